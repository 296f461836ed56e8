"""Callbacks: what a Python program is called with while a run trains, and how it asks the run to stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.runs.lifecycle import Stop
    from meshwright.train import Recorder

ASKED = "callback"
"""Stands where a signal's name would, in the record of a run that a callback stopped."""


class Callback:
    """Derive from this and override what you need. `on_step` and `on_evaluation` may return True to end the run after
    the step that follows, saved as after a signal."""

    def on_step(self, row: dict[str, Any]) -> bool | None:
        """A training step ended with these numbers, as in metrics.jsonl."""

    def on_evaluation(self, row: dict[str, Any]) -> bool | None:
        """Held-out text (`val_loss`) or an evaluation set (`set`, `set_loss`) was looked at."""

    def on_checkpoint(self, event: dict[str, Any]) -> None:
        """A checkpoint is on the disk: its step and path."""

    def on_end(self, run: Any) -> None:
        """The run is over: what `open_run` gives."""


class Callbacks:
    """Some callbacks as one; they are called in the order given, and what one of them raises ends the run."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._all = tuple(callbacks)
        self.asked = False
        """Whether one of them asked the run to stop."""

    def __bool__(self) -> bool:
        return bool(self._all)

    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        for callback in self._all:
            stop = callback.on_step(row) if "loss" in row else callback.on_evaluation(row)
            self.asked = self.asked or stop is True

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """A row of events.jsonl."""
        if kind == "checkpoint":
            for callback in self._all:
                callback.on_checkpoint(fields)

    def end(self, run: Any) -> None:
        """The run is over."""
        for callback in self._all:
            callback.on_end(run)


class CallingRecorder:
    """A recorder that calls callbacks with what it has recorded."""

    def __init__(self, recorder: Recorder, callbacks: Callbacks) -> None:
        self._recorder, self._callbacks = recorder, callbacks

    def metric(self, row: dict[str, Any]) -> None:
        """Recorded first."""
        self._recorder.metric(row)
        self._callbacks.row(dict(row))

    def event(self, kind: str, **fields: Any) -> None:
        """Recorded first."""
        self._recorder.event(kind, **fields)
        self._callbacks.event(kind, fields)

    def sample(self, step: int, text: str) -> None:
        """Recorded alone."""
        self._recorder.sample(step, text)

    def flush(self) -> None:
        """The recorder's."""
        self._recorder.flush()


class StopAsked:
    """Becomes true when a signal or a callback asked the run to stop."""

    def __init__(self, stop: Stop, callbacks: Callbacks) -> None:
        self._stop, self._callbacks = stop, callbacks
        self.signal: str | None = None

    def __call__(self) -> bool:
        asked = self._stop() or self._callbacks.asked
        self.signal = self._stop.signal or (ASKED if asked else None)
        return asked
