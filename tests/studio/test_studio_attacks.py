"""What a hostile page, file name, log line, upload or neighbour may try: each is refused or harmless."""

import http.client
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from studio_runs import make_run

from meshwright.errors import UserError
from meshwright.runs import RunFolder
from meshwright.studio import Studio

NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """A server whose runs folder has secrets beside it and links that lead to them; its planner is never started."""
    outside = tmp_path_factory.mktemp("attacks")
    (outside / "secret.txt").write_text("the secret")
    root = outside / "runs"
    root.mkdir()
    run = make_run(root / f"run {NASTY.replace('/', '_')}", steps=3, raw=f"# {NASTY}\n")
    run.event(NASTY, note=NASTY, loss=float("nan"))
    run.sample(4, NASTY)
    logs = run.path / "logs"
    (logs / "rank-0.err").write_text(NASTY + "\n")
    (logs / "linked.err").symlink_to(outside / "secret.txt")
    (run.path / "samples" / "step-00000009.txt").symlink_to(outside / "secret.txt")
    os.mkfifo(logs / "pipe.err")
    make_run(outside / "elsewhere", steps=3)
    (root / "linked-run").symlink_to(outside / "elsewhere")
    torn = make_run(root / "torn", steps=3)
    for name in ("metrics.jsonl", "events.jsonl", "memory.jsonl"):
        with (torn.path / name).open("ab") as file:
            file.write(b'\xff\xfe not json\n[1, 2]\n{"kind": 3}\n{"step": "x", "loss": []}\n{"ste')
    for name in ("job.toml", "events.jsonl"):
        linked = make_run(root / f"inner-{name}", steps=2).path / name
        linked.unlink()
        linked.symlink_to(outside / "secret.txt")
    server = Studio(root)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.close()


def ask(
    server: Studio, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes | None = None
) -> tuple[int, dict[str, str], str]:
    """A raw request, so that nothing tidies its path: status, headers, text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.guard.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()
    finally:
        connection.close()


def named(server: Studio) -> str:
    return next(name for name in server.runs.names() if "onerror" in name)


def query(**fields: str) -> str:
    from urllib.parse import urlencode

    return urlencode(fields)


@pytest.mark.parametrize(
    "path",
    [
        "/../../secret.txt",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/api/run?run=..%2felsewhere",
        "/api/run?run=..",
        "/api/run?run=",
        "/api/run?run=%2fetc",
        "/api/run?run=linked-run",
        "/api/log?run=torn&log=..%2fjob.toml",
        "/api/log?run=torn&log=%00",
        "/api/log?run=torn&log=rank-1.err&offset=x",
        "/api/log?run=..%2felsewhere&log=rank-1.err",
        "/api/predicted?run=..%2felsewhere",
        "/api/settings?run=torn&run=..%2felsewhere",
        "/api/note?run=torn",
        "/api/page?page=..%2f..%2fserver",
        "/guide/../server.py",
        "/guide/playbook/../../../server.py",
        "/guide/playbook/README.md",
        "/api/curves?run=torn&x=__class__",
        "/etc/passwd",
        "/runs/",
    ],
)
def test_no_path_leads_out(place: Studio, path: str) -> None:
    status, _, text = ask(place, path)
    assert status == 404 and "secret" not in text and "root:" not in text


def test_links_and_pipes_are_not_followed(place: Studio) -> None:
    run = named(place)
    assert "linked-run" not in place.runs.names()
    for log in ("linked.err", "pipe.err"):
        assert ask(place, "/api/log?" + query(run=run, log=log))[0] == 404
    _, _, shown = ask(place, "/api/run?" + query(run=run))
    assert "the secret" not in shown and "linked.err" not in shown
    assert json.loads(ask(place, "/api/curves?run=linked-run")[2]) == {"runs": {}}
    for name in ("inner-job.toml", "inner-events.jsonl"):
        assert "the secret" not in ask(place, "/api/run?" + query(run=name))[2]


def test_files_that_are_no_rows_are_read_around(place: Studio) -> None:
    status, _, text = ask(place, "/api/runs")
    assert status == 200 and "torn" in text
    curves = json.loads(ask(place, "/api/curves?run=torn")[2])["runs"]["torn"]
    assert curves["x"] == [1, 2, 3]
    assert ask(place, "/api/run?run=torn")[0] == 200


def test_names_and_lines_are_data_not_markup(place: Studio) -> None:
    """Everything from a run travels as JSON, which no browser takes for a page."""
    run = named(place)
    for path in ("/api/runs", "/api/run?" + query(run=run), "/api/log?" + query(run=run, log="rank-0.err")):
        status, headers, text = ask(place, path)
        assert status == 200 and headers["Content-Type"].startswith("application/json")
        assert headers["X-Content-Type-Options"] == "nosniff" and "onerror" in text


@pytest.mark.browser
@pytest.mark.thorough
def test_nothing_hostile_runs_in_a_browser(browser: Any, place: Studio) -> None:
    page = browser.new_page()
    alarms: list[str] = []
    page.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: alarms.append(request.url) if request.url.endswith("/x") else None)
    page.on("console", lambda message: alarms.append(message.text) if message.type == "error" else None)
    page.goto(place.address + "#runs?" + query(show=named(place)))
    page.wait_for_selector("#log option", state="attached")
    page.select_option("#log", "rank-0.err")
    page.wait_for_selector("#log-text:has-text('onerror')")
    assert page.locator("#run-title").inner_text() == named(place)
    assert page.locator("#events th:has-text('onerror')").count() == 1
    assert page.locator("#runs img, #runs script:not([type])").count() == 0
    assert alarms == []
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None  # the policy stops even a script that got in
    page.close()


def test_requests_of_other_pages_are_refused(place: Studio) -> None:
    own = f"127.0.0.1:{place.guard.port}"
    for headers in (
        {"Host": f"evil.example:{place.guard.port}"},  # a name that was let point to this machine
        {"Host": "127.0.0.1"},
        {"Host": own, "Origin": "http://evil.example"},
        {"Host": own, "Origin": "null"},
        {"Host": own, "Sec-Fetch-Site": "cross-site"},
        {"Host": own, "sec-fetch-site": "same-site"},
    ):
        status, told, text = ask(place, "/api/runs", headers)
        assert status == 403 and "onerror" not in text and "Access-Control-Allow-Origin" not in told, headers
    assert ask(place, "/api/runs", {"Host": own, "Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"})[0] == 200


def test_uploads_are_small_json(place: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them reaches the planner: asking it would break the answer off."""
    monkeypatch.delattr(type(place.planner), "ask")
    kind = {"Content-Type": "application/json"}
    for headers, body, expected in (
        ({**kind, "Content-Length": str(100 * 2**20)}, b"{", 413),  # refused before it is read
        ({**kind}, None, 411),
        ({**kind, "Content-Length": "-5"}, None, 411),
        ({**kind, "Content-Length": "5"}, b"hello", 400),
        ({**kind, "Content-Length": "2"}, b"[]", 400),
        ({**kind, "Content-Length": "14"}, b'{"part":"run"}', 400),  # only the server asks about runs
        ({**kind, "Content-Length": "200000"}, b"[" * 200_000, 400),
        ({"Content-Type": "text/plain", "Content-Length": "2"}, b"{}", 415),  # what a form of another page could send
    ):
        assert ask(place, "/api/plan", headers, "POST", body)[0] == expected, headers


def note(server: Studio, run: str, text: Any = "x", before: Any = "", **headers: str) -> int:
    """The status of an attempt to write a note, from the studio's own page unless headers say otherwise."""
    body = json.dumps({"run": run, "text": text, "before": before}).encode()
    own = {"Content-Type": "application/json", "Origin": f"http://127.0.0.1:{server.guard.port}"}
    sent = {
        **own,
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return ask(server, "/api/note", {name: value for name, value in sent.items() if value}, "POST", body)[0]


def test_only_the_own_page_writes_notes_and_only_into_runs(place: Studio, tmp_path: Path) -> None:
    files = ("job.resolved.json", "events.jsonl", "metrics.jsonl")
    run = make_run(place.runs.root / "noted", steps=2).path
    secret = place.runs.root.parent / "secret.txt"
    before = {name: (run / name).read_bytes() for name in files}
    for headers in (
        {"Origin": ""},  # not a browser's
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Content_Type": "text/plain"},  # what a form of another page could send
    ):
        assert note(place, "noted", **headers) in (403, 415), headers
    for name in ("..", "../elsewhere", "linked-run", "", "nothing", "noted/logs", "/etc"):
        assert note(place, name) == 404, name
    for text in (1, None, ["x"], "a\x00b", "a\x1b[31mb", "x" * 70_000):
        assert note(place, "noted", text) == 400
    assert not (run / "notes.txt").exists()
    (run / "notes.txt").symlink_to(secret)
    assert note(place, "noted", "mine") == 200  # replaces the link, does not write where it leads
    assert secret.read_text() == "the secret" and not (run / "notes.txt").is_symlink()
    assert note(place, "noted", "theirs", before="") == 400  # written meanwhile
    assert note(place, "noted", "ours\n", before="mine") == 200
    assert (run / "notes.txt").read_text() == "ours\n"
    assert {name: (run / name).read_bytes() for name in files} == before
    assert not list(run.glob(".*")) and sorted(path.name for path in place.runs.root.parent.iterdir()) == [
        "elsewhere",
        "runs",
        "secret.txt",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_note_that_cannot_be_written_is_said(place: Studio) -> None:
    run = make_run(place.runs.root / "closed", steps=2).path
    run.chmod(0o555)
    assert note(place, "closed") == 400
    run.chmod(0o755)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_else_changes_a_run(place: Studio, method: str) -> None:
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in place.runs.root.rglob("*"))
    for path in ("/api/run?run=torn", "/api/runs", "/", "/static/app.js"):
        assert ask(place, path, {"Content-Length": "0"}, method)[0] in (404, 501)
    for path in ("/api/runs", "/api/run?run=torn", "/api/curves?run=torn", "/"):
        ask(place, path)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in place.runs.root.rglob("*")) == before


def test_pages_may_run_only_our_files(place: Studio) -> None:
    status, headers, text = ask(place, "/")
    policy = headers["Content-Security-Policy"]
    assert (
        status == 200 and "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
    )
    assert (
        "frame-ancestors 'none'" in policy and "style=" not in text and "<script>" not in text and "onclick" not in text
    )


def test_another_address_needs_a_token(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    server = Studio(tmp_path, host="0.0.0.0")
    assert server.guard.token and len(server.guard.token) > 20 and server.guard.token in server.address
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        for path, headers in (
            ("/", {}),
            ("/static/app.js", {}),
            ("/api/runs", {"Cookie": "meshwright=wrong"}),
            ("/api/runs?token=" + server.guard.token[:-1], {}),
            ("/api/runs?token=%ff", {}),
            ("/?token=", {}),
        ):
            status, _, text = ask(server, path, headers)
            assert status == 403 and '"run"' not in text, path
        status, headers, _ = ask(server, f"/?token={server.guard.token}")
        assert status == 303 and "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(server, "/api/runs", {"Cookie": cookie})[0] == 200
        assert ask(server, "/api/runs", {"Cookie": cookie, "Origin": "http://evil.example"})[0] == 403
    finally:
        server.shutdown()
        server.close()


def test_by_default_only_this_machine_is_served(place: Studio) -> None:
    assert place.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UserError, match=rf"--port = {place.guard.port} cannot be used"):
        Studio(place.runs.root, port=place.guard.port)
    with socket.create_connection(("127.0.0.1", place.guard.port)) as silent:  # one that says nothing holds nobody up
        assert ask(place, "/api/runs")[0] == 200
        silent.close()


def test_no_code_of_a_run_folder_runs(tmp_path: Path) -> None:
    job = {"run": {"steps": 3}, "model": {"file": "own.py"}, "data": {"encoder": "own.py:Encoder"}}
    run = RunFolder.create(tmp_path / "sent", "", job, ["meshwright"])
    run.event("start", device="CPU", ranks=1, attempt=0, step=0)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    shutil.copy(tmp_path / "own.py", run.path / "own.py")
    server = Studio(tmp_path)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        for path in ("/", "/api/runs", "/api/run?run=sent", "/api/curves?run=sent"):
            assert ask(server, path)[0] == 200
    finally:
        server.shutdown()
        server.close()
    assert not (tmp_path / "owned").exists()
