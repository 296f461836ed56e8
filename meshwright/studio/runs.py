"""The runs of a folder, as the page lists and shows them; of a run only its notes are written."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

from meshwright.atomic import disk_refusal
from meshwright.errors import UserError
from meshwright.reading import (
    EVENTS,
    FILE_BYTES,
    MEMORY,
    METRICS,
    REHEARSAL,
    Tally,
    Unfit,
    is_number,
    parse_json,
    rows_in,
)
from meshwright.rehearse.folder import LARGEST, parse_rehearsal
from meshwright.runs import NOTES, state_of
from meshwright.runs.rehearsed import REHEARSED
from meshwright.studio.confined import Outside, names_inside, open_inside, read_inside, write_inside
from meshwright.studio.follow import AXES, Follower
from meshwright.studio.memory import memory_chart
from meshwright.studio.rehearsal import rehearsal_details
from meshwright.studio.settings import MOST_RUNS, differing

_FIRST_EVENTS_BYTES, _LAST_EVENTS_BYTES = 1 << 20, 3 << 20
_MOST_TEXT = 1 << 16
_MOST_EVENTS = 200
_MOST_MEMORY_BYTES = 4 << 20
_LOG_TAIL = 1 << 16
_ROW_TAIL = 1 << 14
_READ_S = 0.15
"""Time one request may spend reading; the page repeats the request until everything is read."""
_POINTS = 24_000
"""Buckets of all curves in one answer, shared by the requested runs."""
_SILENT_S = 180.0
_SILENT_STEPS = 20
_NOTE_BYTES, _NOTE_LINE = 1 << 16, 80
_MARKS = ("restart", "resume", "bad_step", "overflow", "skip", "rewind", "checkpoint", "checkpoint_failed", "stop")


@dataclass
class _Events:
    """The content of events.jsonl at a given size and modification time."""

    stamp: tuple[int, float]
    rows: list[dict[str, Any]]
    tally: Tally


@dataclass
class _Seen:
    """When a run's current metrics were first seen, by the monotonic clock, and how old they were then."""

    stamp: tuple[int, float]
    at: float
    age_s: float


class Runs:
    """Run folders directly below one folder, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followers: dict[str, Follower] = {}
        self._events: dict[str, _Events] = {}
        self._seen: dict[str, _Seen] = {}
        self._lock = Lock()

    def names(self) -> list[str]:
        """Every run folder's name, the newest first; links are not followed."""
        found = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        try:
                            descriptor = open_inside(self.root, entry.name, "job.resolved.json")
                        except Outside:
                            continue
                        found.append((os.fstat(descriptor).st_mtime, entry.name))
                        os.close(descriptor)
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)]

    def listed(self) -> list[dict[str, Any]]:
        """An entry for every run: its name, one word for its state, its size, and its progress."""
        names = self.names()
        with self._lock:
            for kept in (self._followers, self._events, self._seen):
                for gone in kept.keys() - set(names):
                    del kept[gone]
        return [self._line(name) for name in names]

    def _line(self, name: str) -> dict[str, Any]:
        events, stamp = self.events(name), self._stamp(name, "metrics.jsonl")
        last = self._last_row(name, stamp[0])
        state: str = heard(state_of(events), self._silent_s(name, stamp), last.get("step_s"))
        rehearsed = self._is_rehearsal(name)
        return {
            "name": name,
            "kind": "rehearsal" if rehearsed else "training",
            "state": REHEARSED if rehearsed else state,
            "version": stamp[0],
            "step": _number(last.get("step")),
            "loss": _number(last.get("loss")),
            "unread": sum(tally.bad for tally in self._tallies(name)),
            "note": self.note(name).strip().partition("\n")[0][:_NOTE_LINE],
        }

    def _is_rehearsal(self, name: str) -> bool:
        return self._stamp(name, REHEARSAL) != (0, 0.0)

    def _silent_s(self, name: str, stamp: tuple[int, float]) -> float:
        """How long a run's metrics have not changed; the wall clock counts only before they were first seen."""
        now, seen = time.monotonic(), self._seen.get(name)
        if seen is None or seen.stamp != stamp:
            age_s = max(0.0, time.time() - stamp[1]) if seen is None else 0.0
            seen = self._seen[name] = _Seen(stamp, now, age_s)
        return seen.age_s + now - seen.at

    def _stamp(self, *parts: str) -> tuple[int, float]:
        """A file's size and modification time."""
        try:
            descriptor = open_inside(self.root, *parts)
        except Outside:
            return 0, 0.0
        try:
            found = os.fstat(descriptor)
            return found.st_size, found.st_mtime
        finally:
            os.close(descriptor)

    def _last_row(self, name: str, size: int) -> dict[str, Any]:
        """The newest row of a step, from the end of the file."""
        rows = rows_in(self._tail(name, "metrics.jsonl", size, _ROW_TAIL), METRICS, Tally(METRICS.name))
        return next((row for row in reversed(rows) if "loss" in row), {})

    def _tail(self, name: str, file: str, size: int, most: int) -> bytes:
        """The complete lines among the last bytes of a file."""
        data = self._bytes(name, file, most=most, start=max(0, size - most))
        return data if size <= most else data.partition(b"\n")[2]

    def events(self, name: str) -> list[dict[str, Any]]:
        """All events of a run, or the first and the last of very many; invalid lines are counted and left out."""
        stamp = self._stamp(name, EVENTS.name)
        known = self._events.get(name)
        if known is None or known.stamp != stamp:
            tally = Tally(EVENTS.name)
            most = _FIRST_EVENTS_BYTES + _LAST_EVENTS_BYTES
            if stamp[0] <= most:
                rows = rows_in(self._bytes(name, EVENTS.name, most=most), EVENTS, tally)
            else:
                tally.whole = False
                rows = rows_in(self._bytes(name, EVENTS.name, most=_FIRST_EVENTS_BYTES), EVENTS, tally)
                rows += rows_in(self._tail(name, EVENTS.name, stamp[0], _LAST_EVENTS_BYTES), EVENTS, tally)
            known = self._events[name] = _Events(stamp, rows, tally)
        return known.rows

    def _tallies(self, name: str) -> list[Tally]:
        """Unreadable lines of a run's events, and of its metrics as far as they were requested."""
        events, follower = self._events.get(name), self._followers.get(name)
        return [one.tally for one in (events, follower) if one is not None]

    def curves(self, names: Sequence[str], axis: str) -> dict[str, Any]:
        """The curves of some runs, with as many points as a screen can show, and how much of each was read."""
        if axis not in AXES:
            raise Outside(axis)
        known = set(self.names())
        names = [name for name in dict.fromkeys(names) if name in known]
        until = time.monotonic() + _READ_S
        buckets = max(60, min(800, _POINTS // max(1, 8 * len(names))))
        answer: dict[str, Any] = {}
        for name in names:
            with self._lock:
                follower = self._followers.setdefault(name, Follower(self.root, name))
            if time.monotonic() < until:
                follower.read(until)
            elif follower.read_share < 1 and answer:
                continue  # read when the page asks again
            answer[name] = self._curve(name, follower, axis, buckets)
        return answer

    def _curve(self, name: str, follower: Follower, axis: str, buckets: int) -> dict[str, Any]:
        events = [event for event in self.events(name) if event["kind"] in _MARKS and event.get("step") is not None]
        places = follower.places([event["step"] for event in events], axis)
        marks = [{"kind": event["kind"], "x": float(at)} for event, at in zip(events, places, strict=True)]
        read = {"version": follower.version, "read": follower.read_share}
        return {**read, **follower.drawn(axis, buckets), "marks": marks[-_MOST_EVENTS:]}

    def shown(self, name: str) -> dict[str, Any]:
        """The details of one run."""
        self._require(name)
        events, memory = self.events(name), Tally(MEMORY.name)
        rows = rows_in(self._bytes(name, MEMORY.name, most=_MOST_MEMORY_BYTES), MEMORY, memory)
        return {
            "name": name,
            "job": self._text(name, "job.toml"),
            "events": events[-_MOST_EVENTS:],
            "events_left_out": max(0, len(events) - _MOST_EVENTS),
            "samples": self._samples(name),
            "logs": names_inside(self.root, name, "logs"),
            "note": self.note(name),
            "memory": memory_chart(rows),
            "rehearsal": self._rehearsal(name),
            "unread": [report for tally in (*self._tallies(name), memory) if (report := tally.sentence())],
        }

    def _rehearsal(self, name: str) -> str:
        """What a rehearsal found, as HTML; empty for a training."""
        if not self._is_rehearsal(name):
            return ""
        try:
            return rehearsal_details(parse_rehearsal(self._bytes(name, REHEARSAL, most=LARGEST)))
        except Unfit as unfit:
            return f'<p class="note alarm">{REHEARSAL} is damaged ({escape(str(unfit))}); rehearse the job again.</p>'

    def log(self, name: str, log: str, offset: int | None) -> dict[str, Any]:
        """The end of a rank's log, or what came after an offset."""
        self._require(name)
        descriptor = open_inside(self.root, name, "logs", log)
        try:
            size = os.fstat(descriptor).st_size
            start = max(0, size - _LOG_TAIL) if offset is None or not 0 <= offset <= size else offset
            data = os.pread(descriptor, _LOG_TAIL, start)
        finally:
            os.close(descriptor)
        return {
            "text": data.decode("utf-8", "replace"),
            "offset": start + len(data),
            "cut": offset is None and start > 0,
        }

    def question(self, name: str) -> dict[str, Any]:
        """What the planner needs to compare this run with a prediction: its newest steps, its last start and stop."""
        self._require(name)
        events = {event["kind"]: event for event in self.events(name) if event["kind"] in ("start", "stop")}
        size, _ = self._stamp(name, METRICS.name)
        rows = rows_in(self._tail(name, METRICS.name, size, _MOST_TEXT), METRICS, Tally(METRICS.name))
        metrics = [{"step": row["step"], "step_s": row.get("step_s")} for row in rows]
        return {"part": "run", "job": self._job(name), "metrics": metrics, "events": list(events.values())}

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """The settings in which the first few of these runs differ."""
        for name in names[:MOST_RUNS]:
            self._require(name)
        return differing({name: self._job(name) for name in names[:MOST_RUNS]})

    def note(self, name: str) -> str:
        """What the user wrote about a run."""
        return self._bytes(name, NOTES, most=_NOTE_BYTES).decode("utf-8", "replace")

    def write_note(self, name: str, text: Any, before: Any) -> None:
        """Replace a run's note, if it still is the one that the user saw."""
        self._require(name)
        if not isinstance(text, str) or any(ord(each) < 32 and each not in "\n\t" for each in text):
            raise UserError("a note must be text without control characters; remove them")
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            raise UserError("a note must be text that UTF-8 can represent; remove lone surrogates") from None
        if len(raw) > _NOTE_BYTES:
            raise UserError(f"a note may have at most {_NOTE_BYTES:,} bytes; shorten it")
        with self._lock:
            if self.note(name) != before:
                raise UserError("the note was changed elsewhere meanwhile; copy your text and reload the page")
            try:
                write_inside(self.root, name, NOTES, content=raw)
            except OSError as error:
                raise disk_refusal(f"{NOTES} of {name}", error) or error from error

    def _job(self, name: str) -> dict[str, Any]:
        try:
            job = parse_json(self._bytes(name, "job.resolved.json", most=FILE_BYTES))
            if not isinstance(job, dict):
                raise Unfit("it is not a table of settings")
        except Unfit as unfit:
            raise UserError(f"job.resolved.json of {name} is damaged ({unfit}); restore it from a copy") from None
        return job

    def _samples(self, name: str) -> list[dict[str, Any]]:
        files = [file for file in names_inside(self.root, name, "samples") if file.startswith("step-")]
        files.sort(key=lambda file: (len(file), file))  # from step 100,000,000 on a name has more digits
        latest = [
            {"name": file.removesuffix(".txt"), "text": self._text(name, "samples", file)} for file in files[-12:]
        ]
        return latest[::-1]

    def _text(self, *parts: str) -> str:
        return self._bytes(*parts, most=_MOST_TEXT).decode("utf-8", "replace")

    def _bytes(self, *parts: str, most: int, start: int = 0) -> bytes:
        try:
            return read_inside(self.root, *parts, most=most, start=start)
        except Outside:
            return b""

    def _require(self, name: str) -> None:
        os.close(open_inside(self.root, name, "job.resolved.json"))


def heard(state: str, silent_s: float, step_s: Any) -> str:
    """The state; `silent` if a run is marked as running but has written nothing for long, as after a kill."""
    long = max(_SILENT_S, _SILENT_STEPS * (_number(step_s) or 0))
    return "silent" if state == "running" and silent_s > long else state


def _number(value: Any) -> float | None:
    """A number that a page can show, or None for anything else."""
    return value if is_number(value) else None
