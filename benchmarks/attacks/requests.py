"""Requests to the studio that no browser sends; after each the server must still answer a valid one."""

import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, InternalError
from attacks.small_run import finished_run

PATHS = ["/", "/api/runs", "/api/run?run=run", "/api/curves?run=run", "/api/log?run=run&log=rank-0.err", "/api/choices"]
PATHS += ["/api/page?page=README", "/api/guide", "/static/app.js", "/guide/x", "/api/plan", "/api/predicted?run=.."]
PATHS += ["/api/settings?run=run&run=..", "/api/note"]
PATHS += [
    "/../../etc/passwd",
    "/static/../server.py",
    "//etc/passwd",
    "/static/%2e%2e/server.py",
    "/api/run?run=../run",
]
PATHS += [
    "/api/run?run=%00",
    "/api/log?run=run&log=..%2fjob.toml",
    "/api/log?run=run&log=rank-0.err&offset=" + "9" * 5000,
]
PATHS += [
    "/api/log?run=run&log=rank-0.err&offset=-1",
    "/api/curves?" + "run=run&" * 299,
    "/api/curves?x=__class__&run=run",
]
PATHS += [
    "/?" + "&" * 2000,
    "/?token=" + "a" * 3000,
    "http://[::1",
    "*",
    "/" + "a" * 40_000,
    "/api/run?run=\xff",
    "/\x00",
    "",
]
METHODS = ["GET", "GET", "GET", "POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "get", "G" * 5000, "", "\x00", "PRI"]
HEADERS = [
    "Host: evil.example",
    "Host:",
    "Host: 127.0.0.1",
    "Origin: null",
    "Origin: http://evil.example",
    "X" * 70_000,
]
HEADERS += ["Content-Length: 10", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 0x10"]
HEADERS += ["Transfer-Encoding: chunked", "Content-Type: application/json", "Cookie: meshwright=" + "a" * 5000]
HEADERS += ["Cookie: \x00;;;=", "Sec-Fetch-Site: cross-site", "Connection: keep-alive", "Expect: 100-continue"]
HEADERS += ["Range: bytes=0-1", "X: " + "a" * 40_000, " folded", "no colon", "\x00: \x00", "Upgrade: h2c"]
BODIES = [b"", b"{}", b"[" * 50_000, b"\xff" * 100, b'{"part": "search"', b"GET / HTTP/1.1\r\n\r\n", b"0\r\n\r\n"]
BODIES += [b'{"run": "..", "text": [], "before": 1}', b'{"run": "run", "text": "\\ud800", "before": ""}']


def fetch(port: int, path: str) -> tuple[int, str]:
    """A valid request: status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", "replace")
    finally:
        connection.close()


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of hostile connections."""
    finished_run()
    number = 0
    while True:
        number += 1
        kind = chance.choice(("request", "request", "request", "bytes", "crowd", "drip", "token"))
        yield Case(f"{number}: {kind}", partial(_run, kind, chance.getrandbits(32)), seconds=30.0, memory_gib=0.5)


def _run(kind: str, seed: int, folder: Path) -> None:
    from meshwright.studio import Studio

    chance = random.Random(seed)
    token = "correct horse battery" if kind == "token" else None
    server = Studio(finished_run().parent, token=token)
    port = server.guard.port
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    held = []
    if kind == "crowd":
        held = [_connected(port) for _ in range(chance.choice((70, 200)))]
        for client in held:
            with suppress(OSError):
                client.sendall(chance.choice((b"", b"GET", b"GET / HTTP/1.1\r\nHost:", b"POST /api/plan HTTP/1.1\r\n")))
    elif kind == "drip":
        with _connected(port) as client, suppress(OSError):
            for byte in _request(chance, port)[: chance.randrange(5, 60)]:
                client.sendall(bytes([byte]))
                time.sleep(0.001)
    elif kind == "token":
        found = [fetch(port, f"/api/runs?token=guess{number}")[0] for number in range(15)]
        if set(found) - {403, 429} or found[-1] != 429:
            raise InternalError(f"wrong tokens were answered {found}")
        return
    else:
        for _ in range(chance.choice((1, 1, 5))):
            data = _request(chance, port) if kind == "request" else chance.randbytes(chance.choice((1, 50, 5000)))
            answer = _answer(port, data)
            if b" 500 " in answer[:40]:
                raise InternalError(f"{data[:300]!r}: {answer[:2000]!r}")
    status, text = fetch(port, "/api/runs")
    if status != 200 or '"run"' not in text:
        raise InternalError(f"the next good request was answered {status}: {text[:500]}")
    if threading.active_count() > 100:
        raise InternalError(f"{threading.active_count()} threads are held")
    for client in held:
        client.close()


def _request(chance: random.Random, port: int) -> bytes:
    lines = [f"{chance.choice(METHODS)} {chance.choice(PATHS)} {chance.choice(('HTTP/1.1', 'HTTP/1.0', 'HTTP/9', ''))}"]
    if chance.random() < 0.8:
        lines.append(f"Host: 127.0.0.1:{port}")
    lines += [chance.choice(HEADERS) for _ in range(chance.choice((0, 1, 2, 5, 120)))]
    end = chance.choice(("\r\n", "\r\n", "\n", "\r"))
    return (end.join(lines) + 2 * end).encode("latin-1", "replace") + chance.choice(BODIES)


def _answer(port: int, data: bytes) -> bytes:
    answer = b""
    with _connected(port) as client, suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while more := client.recv(1 << 16):
            answer += more
    return answer


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


SERVER_REQUESTS = Family("server requests", draw)
