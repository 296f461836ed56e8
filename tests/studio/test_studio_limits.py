"""A server that is leaned on: dripping and silent connections, huge heads, odd requests, guesses of the token."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from studio_runs import make_run
from test_studio_attacks import ask
from waiting import wait_until

from meshwright.studio import Studio, limits
from meshwright.studio.limits import ALL_WRONG_TOKENS, CONNECTIONS, EVERY_S, WRONG_TOKENS, Guesses


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Studio]:
    make_run(tmp_path / "run", steps=2)
    server = Studio(tmp_path)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.close()


def connect(server: Studio) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.guard.port), timeout=10)


def said(server: Studio, *parts: bytes) -> bytes:
    """All that a raw connection is answered."""
    with connect(server) as client:
        for part in parts:
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    return answer


def test_dripping_connections_make_room_for_others(server: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 3600.0)  # so that none of them ends by itself
    before = threading.active_count()
    slow = []
    for number in range(300):
        client = connect(server)
        client.sendall(b"GET / HTTP/1.1\r\nHost: x" if number % 2 else b"POST /api/plan HTTP/1.1\r\n")
        slow.append(client)
    assert ask(server, "/api/runs")[0] == 200
    assert threading.active_count() - before <= CONNECTIONS + 8 and len(server.connections) <= CONNECTIONS
    for client in slow:
        client.close()
    assert ask(server, "/api/runs")[0] == 200


@pytest.mark.parametrize("body", [b"", b"{"])
def test_a_request_has_a_time_however_it_drips(server: Studio, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.5)
    with connect(server) as client:
        client.sendall(b"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.guard.port)
        if body:
            client.sendall(b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        with pytest.raises(ConnectionError):  # not the TimeoutError of the wait
            wait_until(lambda: client.sendall(body or b"a"), "it takes a request for ever")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (n, b"a" * 1000) for n in range(90)) + b"\r\n",
    ],
)
def test_a_head_is_as_large_as_a_browsers(server: Studio, head: bytes) -> None:
    with suppress(OSError):  # where it is closed before all of it was sent
        assert said(server, head).split(b" ")[1] == b"431"
    assert ask(server, "/api/runs")[0] == 200


def test_a_request_names_one_host(server: Studio) -> None:
    own = b"Host: 127.0.0.1:%d\r\n" % server.guard.port
    for hosts in (own + b"Host: evil.example\r\n", b"Host: evil.example\r\n" + own, own + own, b"", b"Host:\r\n"):
        answer = said(server, b"GET /api/runs HTTP/1.1\r\n" + hosts + b"\r\n")
        assert answer.split(b" ")[1] == b"403" and b'"run"' not in answer, hosts
    assert b" 200 " in said(server, b"GET /api/runs HTTP/1.1\r\n" + own + b"Connection: close\r\n\r\n")
    twice = own + b"Origin: http://127.0.0.1:%d\r\nOrigin: http://evil.example\r\n" % server.guard.port
    assert b" 403 " in said(server, b"GET /api/runs HTTP/1.1\r\n" + twice + b"\r\n")


def test_a_body_is_never_taken_for_a_request(server: Studio) -> None:
    own = b"Host: 127.0.0.1:%d\r\n" % server.guard.port
    hidden = b"GET /static/app.js HTTP/1.1\r\n" + own + b"\r\n"
    for length in (b"Content-Length: %d\r\n" % len(hidden), b"Transfer-Encoding: chunked\r\n"):
        answer = said(server, b"GET /api/runs HTTP/1.1\r\n" + own + length + b"\r\n" + hidden)
        assert answer.count(b"HTTP/1.1 ") == 1


def test_an_error_of_ours_is_an_answer(server: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(server.runs, "listed", broken)
    status, _, text = ask(server, "/api/runs")
    assert status == 500 and "internal error, RuntimeError: oh" in json.loads(text)["error"]
    assert ask(server, "/api/run?run=run")[0] == 200


def test_wrong_tokens_are_counted(tmp_path: Path) -> None:
    server = Studio(tmp_path, host="0.0.0.0")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        right = f"/api/runs?token={server.guard.token}"
        assert ask(server, right)[0] == 200
        found = [ask(server, f"/api/runs?token=guess-{number}")[0] for number in range(WRONG_TOKENS + 5)]
        assert found == [403] * WRONG_TOKENS + [429] * 5
        assert ask(server, "/api/runs", {"Cookie": "meshwright=guess"})[0] == 429
        assert ask(server, right)[0] == 429  # else a guess that is right would be heard all the same
        server.guesses = Guesses(lambda: time.monotonic() + EVERY_S + 1)
        assert ask(server, right)[0] == 200
        for _ in range(3 * WRONG_TOKENS):  # a page that was never told the token guesses nothing
            assert ask(server, "/")[0] == 403
        assert ask(server, right)[0] == 200
    finally:
        server.shutdown()
        server.close()


def test_many_addresses_guess_no_faster() -> None:
    now = [0.0]
    guesses = Guesses(lambda: now[0])
    guesses.right("friend")
    for number in range(ALL_WRONG_TOKENS):
        assert not guesses.refused(f"address-{number}")
        guesses.wrong(f"address-{number}")
    assert guesses.refused("stranger") and not guesses.refused("friend")
    now[0] = EVERY_S + 1
    assert not guesses.refused("stranger")
