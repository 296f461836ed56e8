"""The run folder: everything about a run in one place, written so that a failure leaves nothing incomplete."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from meshwright.atomic import atomic_folder
from meshwright.errors import UserError
from meshwright.job.sanitize import without_secrets
from meshwright.reading import (
    ATTEMPTS,
    EVENTS,
    MEMORY,
    METRICS,
    Row,
    Tally,
    Unfit,
    kept_rows,
    read_object,
    read_text,
    stream_rows,
)
from meshwright.runs.metrics import Metrics, read_metrics
from meshwright.runs.outbox import Outbox, disk_errors, refusal
from meshwright.runs.provenance import describe_code, describe_environment, describe_packages

if TYPE_CHECKING:
    from meshwright.checkpoint import Lease
    from meshwright.job import Job

NOTES = "notes.txt"
"""What the user wrote about a run, in the studio or by hand."""
_WARN_EVERY_S = 60.0
State = Literal["running", "done", "stopped", "failed"]

JOB_FILE, ORIGINAL = "job.toml", "job.original.toml"
"""The job file that gives the run, and the one that the user wrote if it differs: with overrides, or after a resume."""
_STATES: dict[Any, State] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}
_SAMPLE = re.compile(r"step-(\d{1,15})\.txt")
_MOST_SAMPLES = 1000
_SAMPLE_BYTES = 1 << 16
_NEWEST_BYTES = 1 << 18
# The types readers expect of these files' fields, where present.
_ENVIRONMENT = {"time": str, "argv": list, "variables": dict}
_CODE = {"package": dict | None, "working_directory": dict | None}


class RunFolder:
    """A run's folder: created by `create`, read and continued by `open`."""

    def __init__(self, path: Path) -> None:
        """Use `create` or `open`; this only stores the path."""
        self.path = path
        self._outbox = Outbox(path)
        self._refused: OSError | None = None
        self._refused_since, self._warned = 0.0, -math.inf
        self.tell: Callable[[str], None] = _to_stderr
        """Reports that the disk cannot be written, and when it can be again."""
        self._since: float | None = None
        self.unread: dict[str, Tally] = {}
        """Per file of rows that was read: how many lines were unreadable."""
        self.lease: Lease | None = None
        """If set, nothing is appended once a later attempt has taken over the run."""

    @classmethod
    def create(
        cls, path: Path, job_file: str, resolved_job: dict[str, Any], argv: list[str], original: str | None = None
    ) -> Self:
        """Create the folder with job, code version and environment; all of it or nothing.

        `job_file` loads as the job; `original` is what the user wrote, if that is another text.
        """
        path = Path(path)
        cls.require_free(path)
        code, diff = describe_code()
        contents = {
            JOB_FILE: without_secrets(job_file),
            "job.resolved.json": pretty(resolved_job),
            "environment.json": pretty(describe_environment(argv)),
            "code.json": pretty(code),
            "metrics.jsonl": "",
            "events.jsonl": "",
        }
        if original is not None:
            contents[ORIGINAL] = without_secrets(original)
        if diff:
            contents["code.diff"] = diff
        with disk_errors(path), atomic_folder(path) as draft:
            (draft / "samples").mkdir()
            for name, text in contents.items():
                (draft / name).write_text(text, encoding="utf-8")
        return cls(path)

    @staticmethod
    def is_free(path: Path) -> bool:
        """Whether the path does not exist or is an empty folder."""
        return not path.exists() or (path.is_dir() and not any(path.iterdir()))

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Reject a path that is taken; an empty folder is fine."""
        if (path / "job.resolved.json").is_file():
            raise UserError(f'run.folder = "{path}" holds a run; add --resume to continue it, or choose another folder')
        if not cls.is_free(path):
            raise UserError(f'run.folder = "{path}" exists and is not an empty folder; choose another')

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run folder, to read or to continue."""
        path = Path(path)
        if not (path / "job.resolved.json").is_file():
            raise UserError(f'"{path}" is not a run folder; give the folder that `meshwright train` printed')
        return cls(path)

    def begin_attempt(self) -> "Lease":
        """Become the writer of this folder; fences off the previous one."""
        from meshwright.checkpoint import Lease

        starts = [event.get("attempt", 0) for event in self.events("start")]
        with disk_errors(self.path):
            lease = Lease.claim(self.path, max(starts, default=-1) + 1)
        if lease.attempt >= ATTEMPTS:  # whose rows would not be read
            lease.give_up()
            raise UserError(
                f"run.folder = {self.path} claims {lease.attempt} attempts, more than any run can have; start a new run"
            )
        self.lease = lease
        return lease

    def end_attempt(self) -> None:
        """Release what only a running attempt needs."""
        if self.lease is not None:
            with disk_errors(self.path):
                self.lease.give_up()
            self.lease = None

    def describe_attempt(self, number: int, argv: list[str]) -> None:
        """Record what an attempt runs: its current job, code with changes, packages, machine, variables."""
        code, diff = describe_code()
        description = {
            "attempt": number,
            "job": self.job(),
            "code": code,
            "packages": describe_packages(),
            "environment": describe_environment(argv),
        }
        with disk_errors(self.path):
            (self.path / "attempts").mkdir(exist_ok=True)
        if diff:
            self.write(f"attempts/{number}.diff", diff)
        self.write(f"attempts/{number}.json", pretty(description))

    def attempt(self, number: int) -> dict[str, Any]:
        """What an attempt ran, with the names of its description files under `files`."""
        names = [f"attempts/{number}.json", f"attempts/{number}.diff"]
        files = [name for name in names if (self.path / name).is_file()]
        return {**_object(self.path / names[0]), "files": files}

    def metric(self, row: dict[str, Any]) -> None:
        """Append one row of numbers."""
        self._append("metrics.jsonl", row)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event, with the time (UTC) and the seconds since the folder was created."""
        # An error's text may contain the address of a service.
        fields = {name: without_secrets(value) if isinstance(value, str) else value for name, value in fields.items()}
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append("events.jsonl", {"kind": kind, "time": stamp, "elapsed_s": round(self._elapsed_s(), 3), **fields})

    def _elapsed_s(self) -> float:
        """Seconds since the folder was created; unaffected if the clock is set while we run."""
        if self._since is None:
            self._since = time.monotonic() - max(0.0, time.time() - self._made_at())
        return time.monotonic() - self._since

    def _made_at(self) -> float:
        try:
            return datetime.fromisoformat(self.environment()["time"]).timestamp()
        except (UserError, KeyError, ValueError, OverflowError):  # no reason to fail
            return time.time()

    def memory(self, row: dict[str, Any]) -> None:
        """Append one sample of the memory curve."""
        self._append("memory.jsonl", row)

    def sample(self, step: int, text: str) -> None:
        """Save a text sample of a step."""
        self.write(f"samples/step-{step:08d}.txt", text)

    def write(self, name: str, text: str) -> None:
        """Write a small text file of the run, completely or not at all."""
        self._note(self._outbox.put(name, text.encode("utf-8", "replace")))

    def numbers(self) -> Metrics:
        """The rows of numbers so far (in a very long run, the extremes of every interval) and their sums."""
        with _damage_told(path := self.path / "metrics.jsonl"):
            metrics = read_metrics(path)
        self.unread[path.name] = metrics.tally
        return metrics

    def newest(self) -> Metrics:
        """Only the newest rows of numbers, whatever the length of the file."""
        with _damage_told(path := self.path / "metrics.jsonl"):
            metrics = read_metrics(path, _NEWEST_BYTES)
        self.unread[path.name] = metrics.tally
        return metrics

    def metrics(self) -> list[Row]:
        """Only the rows of `numbers`."""
        return self.numbers().rows

    def step_rows(self, step: int) -> list[Row]:
        """Every row that any attempt wrote for one step."""
        with _damage_told(path := self.path / "metrics.jsonl"):
            return [row for row in stream_rows(path, METRICS, Tally(path.name)) if row["step"] == step]

    def events(self, *kinds: str) -> list[Row]:
        """All events so far, or those of some kinds; if there are very many, the first and the last."""
        return self._kept("events.jsonl", lambda row: not kinds or row["kind"] in kinds)

    def memory_curve(self) -> list[Row]:
        """The memory curve of the first steps; empty if it was not recorded."""
        return self._kept("memory.jsonl") if os.path.lexists(self.path / "memory.jsonl") else []

    def _kept(self, name: str, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        tally = self.unread[name] = Tally(name)
        with _damage_told(path := self.path / name):
            return kept_rows(path, MEMORY if name == MEMORY.name else EVENTS, tally, wanted)

    def samples(self) -> dict[int, str]:
        """The text samples by step; if there are very many, the newest."""
        try:
            names = [file.name for file in (self.path / "samples").iterdir()]
        except OSError:
            return {}
        steps = {int(found[1]): name for name in names if (found := _SAMPLE.fullmatch(name))}
        texts = {}
        for step in sorted(steps)[-_MOST_SAMPLES:]:
            with suppress(Unfit, FileNotFoundError):
                texts[step] = read_text(self.path / "samples" / steps[step], _SAMPLE_BYTES)
        return texts

    def job(self) -> dict[str, Any]:
        """The resolved job: section → field → value."""
        job = _object(path := self.path / "job.resolved.json")
        with _damage_told(path):
            if not all(isinstance(section, dict) for section in job.values()):
                raise Unfit("it has no sections of a job")
        return job

    def steps(self) -> int:
        """The number of steps in the job."""
        with _damage_told(self.path / "job.resolved.json"):
            steps = self.job().get("run", {}).get("steps")
            if type(steps) is not int:
                raise Unfit("its run.steps is not a number")
        return steps

    def keep_every(self) -> int | None:
        """At multiples of how many steps the job keeps checkpoints for good."""
        with _damage_told(self.path / "job.resolved.json"):
            every = self.job().get("checkpoint", {}).get("keep_every")
            if every is not None and type(every) is not int:
                raise Unfit("its checkpoint.keep_every is not a number")
        return every

    def resolved_job(self, *, trust: bool = False) -> "Job":
        """The resolved job, validated: fields altered since are rejected by name, and code it names unless trusted."""
        from meshwright.job import job_of_table, require_trust

        job = job_of_table(self.job(), str(self.path / "job.resolved.json"))
        if not trust:
            # Inspecting a run compiles nothing into its cache.
            require_trust(job, str(self.path), frozenset({"data.cache"}))
        return job

    def job_file(self) -> str:
        """A job file that loads as the run's job."""
        with _damage_told(path := self.path / JOB_FILE):
            return read_text(path)

    def environment(self) -> dict[str, Any]:
        """The machine the run started on."""
        return _object(self.path / "environment.json", _ENVIRONMENT)

    def id(self) -> str:
        """The same for every attempt, wherever the folder is moved; the time, machine and command of its start."""
        return sha256(pretty(self.environment()).encode()).hexdigest()[:16]

    def code(self) -> dict[str, Any]:
        """The code the run started from."""
        return _object(self.path / "code.json", _CODE)

    def state(self) -> State:
        """The state after the last start or stop; a run whose process was killed still says running."""
        return state_of(self.events("start", "restart", "stop"))

    def stop_signal(self) -> str | None:
        """The signal that last asked the run to stop, if any."""
        stops = self.events("stop")
        return stops[-1].get("signal") if stops else None

    def written(self) -> bool:
        """Retry writing what the disk has not accepted yet; returns whether everything is written now."""
        if self._refused is not None:
            self._require_lease()
            self._note(self._outbox.send())
        return self._refused is None

    def require_written(self) -> None:
        """Raise if the disk has not accepted everything yet."""
        if not self.written():
            assert self._refused is not None
            raise refusal(self.path, self._refused) from self._refused

    def close(self) -> None:
        """Close files opened for writing; a later line reopens them."""
        self._outbox.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        self._require_lease()
        line = json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        self._note(self._outbox.append(name, line))

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _note(self, refused: OSError | None) -> None:
        """Report that the disk cannot be written, not at every row, and record when it can be again."""
        before, self._refused, now = self._refused, refused, time.monotonic()
        if refused is not None and before is None:
            self._refused_since = now
            if now - self._warned > _WARN_EVERY_S:
                self._warned = now
                self.tell(
                    f"warning: {self.path} cannot be written ({refused.strerror or refused}); the run continues, and "
                    "its records are kept in memory until the disk accepts them"
                )
        elif refused is None and before is not None:
            seconds = round(now - self._refused_since, 3)
            self.event("caught_up", seconds=seconds, error=before.strerror or str(before))
            if self._warned == self._refused_since and self._refused is None:
                self.tell(f"{self.path} can be written again after {seconds:.1f} s; nothing is lost")


def _to_stderr(text: str) -> None:
    with suppress(OSError):  # it may be on the same disk
        sys.stderr.write(f"{text}\n")


def state_of(events: Iterable[dict[str, Any]]) -> State:
    """The state that these events' last start or stop gives."""
    state: State = "running"
    for event in events:
        if event["kind"] in ("start", "restart"):
            state = "running"
        elif event["kind"] == "stop":
            state = _STATES.get(event.get("reason"), "failed")
    return state


def _object(path: Path, types: Mapping[str, Any] | None = None) -> dict[str, Any]:
    with _damage_told(path):
        loaded = read_object(path)
        for name, kind in (types or {}).items():
            if name in loaded and not isinstance(loaded[name], kind):
                raise Unfit(f"its {name} has the wrong type")
    return loaded


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Turn a missing or invalid file into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing, and a run folder needs it; restore it from a copy") from error
    except Unfit as unfit:
        raise UserError(f"{path} is damaged ({unfit}), and a run folder needs it; restore it from a copy") from unfit


def pretty(value: dict[str, Any]) -> str:
    """The text of a small JSON file of a run."""
    return json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def jsonable(value: Any) -> Any:
    """Plain JSON values: non-finite floats as words, torch and numpy scalars as numbers, paths as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value
