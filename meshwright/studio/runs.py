"""The runs of a folder, as the page lists and shows them; everything is read, nothing is written."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from meshwright.launch import rows_of, state_of
from meshwright.studio.follow import AXES, Follower
from meshwright.studio.inside import Outside, names_inside, open_inside, read_inside
from meshwright.studio.memory import memory_chart

_MOST_EVENTS_BYTES = 4 << 20
_MOST_TEXT = 1 << 16
_MOST_EVENTS = 200
_MOST_MEMORY_BYTES = 4 << 20
_LOG_TAIL = 1 << 16
_READ_S = 0.15
"""What one request may spend on reading; the page asks again until all is read."""
_POINTS = 24_000
"""Buckets of all curves in one answer, shared by the runs asked for."""
_SILENT_S = 180.0
_SILENT_STEPS = 20
_MARKS = ("restart", "resume", "bad_step", "overflow", "skip", "rewind", "checkpoint", "checkpoint_failed", "stop")


@dataclass
class _Events:
    """What events.jsonl said when it had this size."""

    size: int
    rows: list[dict[str, Any]]


class Runs:
    """Run folders directly below one folder, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followers: dict[str, Follower] = {}
        self._events: dict[str, _Events] = {}
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
        """A line for every run: its name, one word for its state, its size, and where it is."""
        return [self._line(name) for name in self.names()]

    def _line(self, name: str) -> dict[str, Any]:
        events = self.events(name)
        size, written = self._size(name)
        last = self._last_row(name, size)
        state: str = state_of(event for event in events if "kind" in event)
        return {
            "name": name,
            "state": heard(state, written, last.get("step_s")),
            "version": size,
            "step": _number(last.get("step")),
            "loss": _number(last.get("loss")),
        }

    def _size(self, name: str) -> tuple[int, float]:
        try:
            descriptor = open_inside(self.root, name, "metrics.jsonl")
        except Outside:
            return 0, 0.0
        try:
            found = os.fstat(descriptor)
            return found.st_size, found.st_mtime
        finally:
            os.close(descriptor)

    def _last_row(self, name: str, size: int) -> dict[str, Any]:
        """The newest row of a step, from the file's end."""
        if not size:
            return {}
        tail = self._bytes(name, "metrics.jsonl", most=4096, start=max(0, size - 4096))
        for line in reversed(tail.split(b"\n")[:-1]):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "loss" in row:
                return row
        return {}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Everything that happened in a run; lines that are no rows are left out."""
        data = self._bytes(name, "events.jsonl", most=_MOST_EVENTS_BYTES)
        known = self._events.get(name)
        if known is None or known.size != len(data):
            lines = data.decode("utf-8", "replace").splitlines(keepends=True)
            rows = [row for line in lines for row in _row(line) if "kind" in row]
            known = self._events[name] = _Events(len(data), rows)
        return known.rows

    def curves(self, names: Sequence[str], axis: str) -> dict[str, Any]:
        """The curves of some runs, as many points as a screen has, and how much of each was read."""
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
                continue  # its turn comes when the page asks again
            answer[name] = self._curve(name, follower, axis, buckets)
        return answer

    def _curve(self, name: str, follower: Follower, axis: str, buckets: int) -> dict[str, Any]:
        events = [event for event in self.events(name) if event["kind"] in _MARKS and _whole(event.get("step"))]
        places = follower.places([event["step"] for event in events], axis)
        marks = [{"kind": event["kind"], "x": float(at)} for event, at in zip(events, places, strict=True)]
        read = {"version": follower.version, "read": follower.read_share}
        return {**read, **follower.drawn(axis, buckets), "marks": marks[-_MOST_EVENTS:]}

    def shown(self, name: str) -> dict[str, Any]:
        """What the page tells of one run."""
        self._require(name)
        events = self.events(name)
        return {
            "name": name,
            "job": self._text(name, "job.toml"),
            "events": events[-_MOST_EVENTS:],
            "events_left_out": max(0, len(events) - _MOST_EVENTS),
            "samples": self._samples(name),
            "logs": names_inside(self.root, name, "logs"),
            "memory": self._memory(name),
        }

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
        """What the planner must know to set a prediction beside this run: its newest steps, its last start and stop."""
        self._require(name)
        events = {event["kind"]: event for event in self.events(name) if event["kind"] in ("start", "stop")}
        size, _ = self._size(name)
        tail = self._bytes(name, "metrics.jsonl", most=_MOST_TEXT, start=max(0, size - _MOST_TEXT))
        rows = [row for line in tail.decode("utf-8", "replace").splitlines(keepends=True) for row in _row(line)]
        metrics = [{"step": row.get("step"), "step_s": row.get("step_s")} for row in rows if _whole(row.get("step"))]
        job = json.loads(self._bytes(name, "job.resolved.json", most=1 << 20))
        return {"part": "run", "job": job, "metrics": metrics, "events": list(events.values())}

    def _memory(self, name: str) -> str:
        data = self._bytes(name, "memory.jsonl", most=_MOST_MEMORY_BYTES)
        try:
            return memory_chart(list(rows_of(data.decode("utf-8", "replace").splitlines(keepends=True))))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f'<p class="note">{escape("memory.jsonl cannot be read")}</p>'

    def _samples(self, name: str) -> list[dict[str, Any]]:
        files = [file for file in names_inside(self.root, name, "samples") if file.startswith("step-")]
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


def heard(state: str, written: float, step_s: Any) -> str:
    """The state; `silent` where a run says running, but has written nothing for long: a killed one says no farewell."""
    long = max(_SILENT_S, _SILENT_STEPS * (_number(step_s) or 0))
    return "silent" if state == "running" and time.time() - written > long else state


def _number(value: Any) -> float | None:
    """A number that a page can show; what else a line may hold is none."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return value if plain else None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _row(line: str) -> list[dict[str, Any]]:
    """The row of a line; none where it is cut, or no row at all."""
    try:
        return list(rows_of([line]))
    except (ValueError, AttributeError):
        return []
