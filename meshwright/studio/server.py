"""The studio's server: a few static files and JSON answers; of a run it changes nothing but the user's note."""

import io
import json
import secrets
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.errors import UserError
from meshwright.reading import Unfit, parse_json
from meshwright.studio.confined import Outside
from meshwright.studio.guard import COOKIE, HEADERS, Guard
from meshwright.studio.learn import START, guide_groups, guide_page, guide_picture, guide_titles
from meshwright.studio.limits import QUESTIONS, Connections, Guesses, TimedReader, TooLarge
from meshwright.studio.page_words import label
from meshwright.studio.plan_request import LIMITS
from meshwright.studio.planner_process import PlannerProcess
from meshwright.studio.questions import ASKS
from meshwright.studio.runs import Runs
from meshwright.version import VERSION

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_LARGEST_QUESTION = 1 << 20
_LOOPBACK = ("127.0.0.1", "localhost")


class Refused(Exception):
    """A request that is answered with a status and an error message."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class Studio(ThreadingHTTPServer):
    """The server of one runs folder; call `serve_forever`, then `close`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, runs: Path, port: int = 0, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.runs = Runs(runs)
        self.connections = Connections()
        self.guesses = Guesses()
        self.questions = threading.BoundedSemaphore(QUESTIONS)
        self.planner = PlannerProcess()
        if host not in _LOOPBACK and not token:
            token = secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port = {port} cannot be used on {host} ({error.strerror}); give another, or 0 for any free one"
            ) from error
        self.guard = Guard(self.server_address[1], host, token)

    @property
    def address(self) -> str:
        """The URL to open in a browser, with the token if one is needed."""
        host, port = self.server_address[:2]
        token = f"?token={self.guard.token}" if self.guard.token else ""
        return f"http://{host!s}:{port}/{token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread, if the limit allows another."""
        if self.connections.enter(request):
            super().process_request(request, client_address)
        else:
            self._turn_away(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its slot."""
        self.connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""

    def _turn_away(self, request: socket.socket) -> None:
        try:
            request.settimeout(0.1)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            pass
        super().shutdown_request(request)

    def close(self) -> None:
        """Stop listening and stop the planner."""
        self.server_close()
        self.planner.close()


class _Handler(BaseHTTPRequestHandler):
    server: Studio
    protocol_version = "HTTP/1.1"
    server_version = "Meshwright"
    sys_version = ""
    timeout = 30.0

    def setup(self) -> None:
        """Read through a reader that knows a request's bounds."""
        super().setup()
        self.rfile.close()
        self._reader = TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """One request, or the end of the connection."""
        self._reader.begin()
        try:
            super().handle_one_request()
        except TooLarge:
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            self.close_connection = True
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except (OSError, ValueError):  # a connection that broke off, or was closed to make room
            self.close_connection = True

    def do_GET(self) -> None:
        """Static files and what is read from runs."""
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that nobody reads must not be taken for the next request
        self._answer(self._get)

    def do_POST(self) -> None:
        """A question to the planner, which changes nothing, or a run's note."""
        self._answer(self._post)

    def _answer(self, make: Any) -> None:
        try:
            split = urlsplit(self.path)
            query = parse_qs(split.query, max_num_fields=300)
            refusal = self.server.guard.refusal(self.headers.items())
            if refusal is not None:
                raise Refused(HTTPStatus.FORBIDDEN, refusal)
            self._require_token(query.get("token", [None])[0])
            self.server.connections.answering(self.connection, True)
            make(split.path, query)
        except Refused as refused:
            self.close_connection = True  # an unread body must not be parsed as the next request
            self._send_json({"error": str(refused)}, refused.status)
        except UserError as error:
            self._send_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except (Outside, ValueError):
            self.close_connection = True
            self._send_json({"error": "not found"}, HTTPStatus.NOT_FOUND)
        except OSError:  # the client is gone, too slow, or was dropped for another
            self.close_connection = True
        except Exception as error:  # whatever a run contains, the next request must still work
            self.close_connection = True
            report = f"internal error, {type(error).__name__}: {error}; please report it"
            self._send_json({"error": report}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _require_token(self, token: str | None) -> None:
        address, guesses = str(self.client_address[0]), self.server.guesses
        if self.server.guard.token is not None and guesses.refused(address):
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "too many wrong tokens; wait a minute")
        known = self.server.guard.knows_token(self.headers, token)
        if known:
            guesses.right(address)
            return
        if known is False:
            guesses.wrong(address)
        words = "the token is missing or wrong; open the URL that `meshwright studio` printed"
        raise Refused(HTTPStatus.FORBIDDEN, words)

    def _get(self, path: str, query: dict[str, list[str]]) -> None:
        runs = self.server.runs
        name = query.get("run", [""])[0]
        if path == "/":
            self._first_page("token" in query)
        elif path.startswith("/static/"):
            self._static(path.removeprefix("/static/"))
        elif path.startswith("/guide/"):
            self._send(guide_picture(path.removeprefix("/guide/")), _TYPES["svg"])
        elif path == "/api/choices":
            self._send_json(choices(runs.root))
        elif path == "/api/runs":
            self._send_json({"folder": str(runs.root.absolute()), "runs": runs.listed()})
        elif path == "/api/curves":
            self._send_json({"runs": runs.curves(query.get("run", []), query.get("x", ["step"])[0])})
        elif path == "/api/run":
            self._send_json(runs.shown(name))
        elif path == "/api/settings":
            self._send_json(runs.settings(query.get("run", [])))
        elif path == "/api/log":
            offset = query.get("offset")
            self._send_json(runs.log(name, query.get("log", [""])[0], int(offset[0]) if offset else None))
        elif path == "/api/predicted":
            self._ask(runs.question(name))
        elif path == "/api/guide":
            self._send_json({"start": {"name": START, "title": guide_titles()[START]}, "groups": guide_groups()})
        elif path == "/api/page":
            self._send_json({"html": guide_page(query.get("page", [""])[0])})
        else:
            raise Outside(path)

    def _post(self, path: str, _query: dict[str, list[str]]) -> None:
        if path not in ("/api/plan", "/api/note"):
            raise Refused(HTTPStatus.NOT_FOUND, "not found")
        question = self._body()
        if path == "/api/note":
            if "Origin" not in self.headers:  # every browser sends it with a POST
                raise Refused(HTTPStatus.FORBIDDEN, "only the studio's own page may write notes")
            self.server.runs.write_note(str(question.get("run")), question.get("text"), question.get("before"))
            self._send_json({"saved": True})
            return
        if question.get("part") not in ("search", "question", "layout", "config"):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request needs a part: search, question, layout or config")
        self._ask(question)

    def _body(self) -> dict[str, Any]:
        """The JSON object of a request, within the limits on size and time."""
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a request must be JSON")
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        if len(length) > 9 or int(length) > _LARGEST_QUESTION:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request may have at most 1 MiB")
        self._reader.allow(int(length))
        self.server.connections.answering(self.connection, False)  # may be dropped while its body arrives
        try:
            question = parse_json(self.rfile.read(int(length)))
        except Unfit:
            raise Refused(HTTPStatus.BAD_REQUEST, "a request must be JSON") from None
        self.server.connections.answering(self.connection, True)
        if not isinstance(question, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request must be a JSON object")
        return question

    def _ask(self, question: dict[str, Any]) -> None:
        if not self.server.questions.acquire(blocking=False):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the planner is busy with other requests; try again")
        try:
            answer = self.server.planner.ask(question)
        finally:
            self.server.questions.release()
        self._send_json(answer)

    def _first_page(self, with_token: bool) -> None:
        if with_token and self.server.guard.token:
            # Move it into a cookie that other pages' requests do not carry, and out of the address bar.
            self.send_response(HTTPStatus.SEE_OTHER)
            cookie = f"{COOKIE}={self.server.guard.token}; Path=/; HttpOnly; SameSite=Strict"
            self._end_headers({"Location": "/", "Set-Cookie": cookie, "Content-Length": "0"})
            return
        self._static("index.html")

    def _static(self, name: str) -> None:
        folder = files("meshwright.studio").joinpath("static")
        if name not in {entry.name for entry in folder.iterdir()}:
            raise Outside(name)
        kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
        self._send(folder.joinpath(name).read_bytes(), f"{kind}; charset=utf-8")

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:  # browsers cannot parse non-finite floats
            text = json.dumps(_worded(value), ensure_ascii=False)
        body = text.encode("utf-8", "replace")
        self._send(body, "application/json; charset=utf-8", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.server.connections.answering(self.connection, False)
        self.connection.settimeout(self.timeout)
        self.send_response(status)
        self._end_headers({"Content-Type": kind, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _end_headers(self, headers: dict[str, str]) -> None:
        for key, value in {**HEADERS, **headers}.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing: what matters is on the page."""


def _worded(value: Any) -> Any:
    """The same with strings for non-finite floats."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _worded(inner) for key, inner in value.items()}
    return [_worded(inner) for inner in value] if isinstance(value, list) else value


def choices(runs: Path) -> dict[str, Any]:
    """What the plan page offers."""
    from meshwright.hardware import known_gpus
    from meshwright.job import job_fields, model_preset, model_presets, table_fields
    from meshwright.plan import ALLOWED

    meanings = {name.removeprefix("model."): words for name, words in job_fields() if name.startswith("model.")}
    meanings |= {f"experts.{name}": words for name, words in table_fields("model.experts").items()}
    return {
        "version": VERSION,
        "runs_folder": str(runs),
        "models": {name: model_preset(name) for name in model_presets()},
        "gpus": {gpu.key: {"gib": gpu.memory_gib, "guessed": _is_guessed(gpu.key)} for gpu in known_gpus()},
        "limits": LIMITS,
        "shape": {name: {"label": label(name), "meaning": meanings[name]} for name in LIMITS if name in meanings},
        "allowed": list(ALLOWED),
        "questions": ASKS,
    }


def _is_guessed(gpu: str) -> bool:
    """Whether the planner has only a guess of a GPU's rates, neither published runs nor a profile of it."""
    from meshwright.job.devices import Cluster
    from meshwright.plan import machine_of

    machine = machine_of(Cluster(nodes=1, gpus_per_node=1, gpu=gpu))
    return machine.measured is None and bool(machine.rates.guess)
