"""A Hugging Face hub on this machine: one repository, spoken to by the real huggingface_hub over HTTP."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Hub:
    """What the server serves, and what it was asked for."""

    folder: Path
    repository: str
    gets: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    """Every request, by its method and path."""
    ranges: list[tuple[str, str]] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    """File → bytes after which the first connections for it break off."""
    cuts: int = 10**6
    address: str = ""

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if hub.repository in path:  # the client also asks for what is not of the model
                hub.asked[f"{self.command} {path}"] += 1
            files = hub.files()
            if found := re.fullmatch(f"/api/models/{hub.repository}(/revision/.+)?", path):
                if (found[1] or "/revision/main").rpartition("/")[2] not in ("main", COMMIT):
                    self.refuse("RevisionNotFound")
                    return
                siblings = [{"rfilename": name} for name in files]
                self.send({"id": hub.repository, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
            elif re.fullmatch(f"/api/models/{hub.repository}/tree/.+", path):
                sizes = {name: {"size": len(data), "oid": tag(data)} for name, data in files.items()}
                self.send([{"type": "file", "path": name, **more} for name, more in sizes.items()])
            elif (found := re.fullmatch(f"/{hub.repository}/resolve/[^/]+/(.+)", path)) and found[1] in files:
                self.file(found[1], files[found[1]], body)
            else:
                self.refuse("RepoNotFound" if hub.repository not in path else "EntryNotFound")

        def refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def file(self, name: str, data: bytes, body: bool) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start = int(asked[1]) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{tag(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            hub.gets[name] += 1
            if asked:
                hub.ranges.append((name, asked[0]))
            until = hub.cut.get(name)
            if until is not None and hub.cuts > 0:
                hub.cuts -= 1
                self.wfile.write(data[start : max(start, until)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(data[start:])

    return Handler


def tag(data: bytes) -> str:
    return sha256(data).hexdigest()[:40]


def cached(cache: Path, folder: Path, repository: str, commit: str = COMMIT) -> Path:
    """The layout of huggingface_hub's cache: blobs by hash, a snapshot of links to them, and what main is."""
    storage = cache / f"models--{repository.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    for made in (storage / "blobs", storage / "refs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    (storage / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        blob = storage / "blobs" / tag(path.read_bytes())
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot
