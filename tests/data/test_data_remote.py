"""An S3-speaking server on loopback, killed while it is read from, and web servers: nothing lost or doubled."""

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_media import IMAGE, captioned, write_tar
from data_texts import text_of
from waiting import wait_for_file, wait_until

from meshwright.data import Loader, StreamLoader, open_flow, prepare, training_stream
from meshwright.data.prepared import Progress, Wishes, build, open_prepared
from meshwright.data.raw import Taking, list_inputs, plan_units, read_unit, remote
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

OBJECTS = 4
TEXTS = [[f"object {part} " + text_of(number) for number in range(300)] for part in range(OBJECTS)]


class Server:
    """moto's S3 in a process of its own; it forgets everything when killed, so a new one is filled again."""

    def __init__(self, folder: Path) -> None:
        self.missed = folder / "missed"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, f"no server on port {self.port}")
        self.fill()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def fill(self) -> None:
        import boto3

        client = boto3.client("s3", endpoint_url=self.url)
        client.create_bucket(Bucket="corpus")
        for part, texts in enumerate(TEXTS):
            body = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            client.put_object(Bucket="corpus", Key=f"text/{part}.jsonl", Body=body.encode())
        for name in ("a.txt", "scan.pdf"):
            client.put_object(Bucket="corpus", Key=f"mixed/{name}", Body=b"a few words")

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def restart_once_missed(self) -> threading.Thread:
        """Start again when somebody, in this process or a fork, waits before they try again."""
        self.missed.unlink(missing_ok=True)
        thread = threading.Thread(target=lambda: (wait_for_file(self.missed), self.start()))
        thread.start()
        return thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr(remote, "BLOCK_BYTES", 1 << 15)
        running = Server(tmp_path_factory.mktemp("server"))

        def sleep(seconds: float) -> None:
            running.missed.touch()
            time.sleep(seconds)

        patch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        patch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running
        running.kill()


def test_prepare_outlives_a_killed_server(server: Server, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS[0][:50], 300).save(tokenizer)
    wishes = Wishes(("s3://corpus/text",), tokenizer)
    undisturbed = build(wishes, tmp_path / "undisturbed", 2, unit_bytes=50_000)
    assert undisturbed.documents["train"] + undisturbed.documents["validation"] == 300 * OBJECTS

    restarts: list[threading.Thread] = []
    last: list[Progress] = []

    def report(progress: Progress) -> None:
        last[:] = [progress]
        if progress.stage == "tokens" and 0 < progress.share < 1 and not restarts:
            server.kill()
            restarts.append(server.restart_once_missed())

    disturbed = build(wishes, tmp_path / "disturbed", 2, report, unit_bytes=50_000)
    assert restarts, "the server was never killed"
    restarts[0].join()
    assert last[0].counts.retries > 0
    shards = {name: getattr(disturbed, name) == getattr(undisturbed, name) for name in ("tokens", "documents")}
    assert shards == {"tokens": True, "documents": True}
    files = [{n: r.sha256 for s in m.shards for n, r in s.train.files.items()} for m in (disturbed, undisturbed)]
    assert files[0] == files[1] and len(files[0]) > 10
    assert "object 3 " in open_prepared(tmp_path / "disturbed").tokenizer.decode(
        open_prepared(tmp_path / "disturbed").store("train").read(0, 1 << 30).tolist()
    )


def test_reading_outlives_a_killed_server(server: Server) -> None:
    units = plan_units(list_inputs(["s3://corpus/text/*.jsonl"]).files, 50_000)
    retries = 0

    def watch(read: int, again: int) -> None:
        nonlocal retries
        retries += again

    got = []
    restart = None
    for unit in units:
        for item in read_unit(unit, Taking(), watch):
            got.append(item.text)
            if len(got) == 400:
                server.kill()
                restart = server.restart_once_missed()
    assert restart is not None
    restart.join()
    assert got == [text for texts in TEXTS for text in texts] and retries > 0


def test_a_stream_outlives_a_killed_server(server: Server, tmp_path: Path) -> None:
    train_tokenizer(TEXTS[0][:50], 300).save(tmp_path / "tokenizer.json")
    data = Data(
        sources=("s3://corpus/text",), tokenizer=str(tmp_path / "tokenizer.json"), stream=True, virtual_shards=4
    )
    settings: dict[str, Any] = {"seed": 1, "sequence_length": 64, "global_batch": 8}

    def steps(disturb: bool) -> list[list[list[int]]]:
        loader = StreamLoader(open_flow(data, 300), **settings)
        found = []
        for number in range(60):
            if disturb and number == 0:  # listed and not yet read: later, all of these few texts are in memory
                server.kill()
                restarts.append(server.restart_once_missed())
            found.append(next(loader).batch.tokens_BS.tolist())
        return found

    restarts: list[threading.Thread] = []
    undisturbed = steps(disturb=False)
    assert steps(disturb=True) == undisturbed
    restarts[0].join()


def test_files_of_no_known_kind_are_named(server: Server) -> None:
    inputs = list_inputs(["s3://corpus/mixed"])
    assert [file.name for file in inputs.files] == ["s3://corpus/mixed/a.txt"]
    assert inputs.left_out == ("s3://corpus/mixed/scan.pdf",)


def test_addresses_that_hold_nothing(server: Server, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.2)
    with pytest.raises(UserError, match=r"s3://corpus/none\.jsonl .*; correct the address"):
        list_inputs(["s3://corpus/none.jsonl"])
    with pytest.raises(UserError, match="s3://corpus/none/\\* holds no files; correct the address"):
        list_inputs(["s3://corpus/none/*"])
    (file, *_) = list_inputs(["s3://corpus/text/0.jsonl"]).files
    units = plan_units([file])
    import boto3

    boto3.client("s3", endpoint_url=server.url).put_object(Bucket="corpus", Key="text/0.jsonl", Body=b"{}\n" * 40_000)
    with pytest.raises(UserError, match="changed while it was read"):
        list(read_unit(units[0], Taking()))
    boto3.client("s3", endpoint_url=server.url).delete_object(Bucket="corpus", Key="text/0.jsonl")
    with pytest.raises(UserError, match=r"could not be read for 0 s .*; start again when the server answers"):
        list(read_unit(units[0], Taking()))
    server.kill()
    server.start()


class Plain(http.server.SimpleHTTPRequestHandler):
    """Python's own server gives whole files only; here it also breaks off the first answers to every GET."""

    broken: dict[str, int]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        # The request that only asks whether parts are handed out is not one of those that break.
        if not path.is_file() or self.headers.get("Range") or self.broken.get(self.path, 0) >= 2:
            super().do_GET()
            return
        self.broken[self.path] = self.broken.get(self.path, 0) + 1
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) * self.broken[self.path] // 3])
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)  # what was sent is read before the connection ends
        self.close_connection = True

    def log_message(self, *ignored: object) -> None:
        pass


class Ranged(Plain):
    """A server that hands out parts."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        part = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


def test_pictures_are_fetched_from_the_middle_of_a_tar(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Ranged, "broken", {}, raising=False)
    write_tar(tmp_path / "a.tar", captioned(range(12)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranged, directory=str(tmp_path))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        batches = {}
        for source in (f"http://127.0.0.1:{web.server_port}/a.tar", str(tmp_path / "a.tar")):
            data = Data(
                sources=(source,), fields={"image": IMAGE}, cache=str(tmp_path / "cache"), validation_fraction=0.0
            )
            corpus = prepare(data, 300)
            assert corpus.folder is not None
            assert sum(path.stat().st_size for path in corpus.folder.glob("*.media.bin")) == 0, "nothing is copied"
            for workers in (0, 1):
                loader = Loader(training_stream(corpus, data, 64, 0), global_batch=4, workers=workers)
                batches[source, workers] = next(iter(loader)).batch.media
                loader.close()
        web.shutdown()
    first, *others = batches.values()
    assert all(torch.equal(first.items_BK, other.items_BK) for other in others)


@pytest.mark.parametrize("kind", [Plain, Ranged])
def test_web_servers(tmp_path: Path, monkeypatch, kind: type[Plain]) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(kind, "broken", {}, raising=False)
    body = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[0])
    (tmp_path / "a.jsonl").write_text(body)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(tmp_path))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}/a.jsonl"
        units = plan_units(list_inputs([url]).files, 30_000)
        assert (len(units) > 1) == (kind is Ranged), "only a server that hands out parts is read in parts"
        got = [item.text for unit in units for item in read_unit(unit, Taking())]
        with pytest.raises(UserError, match=r"none\.jsonl does not exist; correct the address"):
            list_inputs([url.replace("a.jsonl", "none.jsonl")])
        web.shutdown()
    assert got == TEXTS[0]
    assert kind is Ranged or kind.broken == {"/a.jsonl": 2}, "the answers were not broken off"
