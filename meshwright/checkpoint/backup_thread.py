"""Backups in the background: training never waits for the store, however slow or silent it is.

A thread copies one checkpoint at a time. What is saved meanwhile takes the place of what waits, so an unreachable store
costs neither memory nor disk. At the end of a run the last checkpoint gets a bounded time.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.backup import back_up, prune_backups
from meshwright.checkpoint.store import Store, sentence_of
from meshwright.job.running import Checkpoint as Settings

RETRY_S = 60.0
"""The pause after a failed copy, until the end of the run cuts it short."""
REPORT_EVERY_S = 600.0
"""How often an unreachable store is reported."""
LAST_S = 120.0
"""How long the end of a run waits for the last copy, besides what its bytes take at the least rate."""
LEAST_BYTES_PER_S = 16 * 2**20
_SAID_AFTER_S = 5.0
"""How long the end of a run waits without a word."""
_LOOK_S = 0.5


@dataclass
class _Last:
    """The wait for the copy of a run's last checkpoint."""

    checkpoint: Path
    limit_s: float
    began: float
    said: bool = False


class BackupThread:
    """Copies the checkpoints of a run to checkpoint.backup_to; its methods return at once."""

    def __init__(self, settings: Settings, event: Callable[..., None], message: Callable[[str], None]) -> None:
        """`event` and `message` report from any thread."""
        assert settings.backup_to is not None
        self._settings, self._target = settings, settings.backup_to
        self._event, self._message = event, message
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting: list[Path] = []
        self._copying: Path | None = None
        self._newest_copied: Path | None = None
        self._error: str | None = None
        """Of the last try, if it failed."""
        self._reported = -REPORT_EVERY_S
        self._last: _Last | None = None

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint as soon as the store is free, in place of an older one that still waits."""
        with self._lock:
            self._waiting = [path for path in self._waiting if self._is_permanent(path)] + [checkpoint]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="backup", daemon=True)
                self._thread.start()

    def in_use(self) -> set[Path]:
        """The checkpoints that must stay in the run folder until they are copied."""
        with self._lock:
            return {*self._waiting, *([self._copying] if self._copying else [])}

    def stop(self) -> None:
        """Try nothing new; another attempt in this process goes on with the backups."""
        with self._lock:
            self._waiting.clear()
        self._ending.set()

    def begin_last(self, checkpoint: Path) -> None:
        """The run ends with this checkpoint: copy it now if it was not, within a limit."""
        if checkpoint != self._newest_copied and checkpoint not in self.in_use():
            self.offer(checkpoint)
        self._ending.set()
        self._last = _Last(checkpoint, LAST_S + _bytes(checkpoint) / LEAST_BYTES_PER_S, time.monotonic())

    def waits(self) -> bool:
        """Wait for a moment; whether the last copy is still under way and within its limit."""
        assert self._last is not None
        thread, passed_s = self._thread, time.monotonic() - self._last.began
        if thread is not None:
            thread.join(min(_LOOK_S, max(0.0, self._last.limit_s - passed_s)))
        if self._thread is None or passed_s >= self._last.limit_s:
            return False
        if not self._last.said and passed_s >= _SAID_AFTER_S:
            self._last.said = True
            self._message(
                f"waiting at most {self._last.limit_s:.0f} s for the backup of {self._last.checkpoint.name} to "
                f"{self._target}"
            )
        return True

    def missing(self) -> str | None:
        """After `waits`: why the last checkpoint has no copy, which is also reported; None if it has one."""
        assert self._last is not None
        checkpoint = self._last.checkpoint
        if checkpoint == self._newest_copied:
            return None
        reason = self._error or f"the store did not take it within {self._last.limit_s:.0f} s"
        self._event("backup_missing", step=_step(checkpoint), store=self._target, error=reason)
        text = (
            f"the last checkpoint, {checkpoint.name}, has no backup in {self._target} ({reason}); it is only in "
            f"{checkpoint.parent}, and resuming the run copies it"
        )
        self._message(f"warning: {text}")
        return text

    def _run(self) -> None:
        store: Store | None = None
        while (checkpoint := self._next()) is not None:
            is_last_try, began = self._ending.is_set(), time.monotonic()
            try:
                store = store or Store.open(self._target)
                address = back_up(checkpoint, store)
            except Exception as error:  # every store raises its own errors
                store = None  # its connection may be what failed
                self._failed(checkpoint, sentence_of(error))
                if is_last_try:
                    break
                self._ending.wait(RETRY_S)
                continue
            self._succeeded(checkpoint, address, time.monotonic() - began)
            self._prune(checkpoint, store)
        with self._lock:
            self._thread = None

    def _next(self) -> Path | None:
        """The newest checkpoint that waits; None, and the thread ends, if there is none."""
        with self._lock:
            self._copying = max(self._waiting, key=_step, default=None)
            if self._copying is None:
                self._thread = None
            else:
                self._waiting.remove(self._copying)
            return self._copying

    def _succeeded(self, checkpoint: Path, address: str, seconds: float) -> None:
        step = _step(checkpoint)
        self._event("backup", step=step, place=address, seconds=round(seconds, 6))
        if self._error is not None:
            self._message(f"step {step} is copied to {self._target}, which works again")
        with self._lock:
            self._copying, self._error = None, None
            self._newest_copied = max(self._newest_copied or checkpoint, checkpoint, key=_step)

    def _failed(self, checkpoint: Path, error: str) -> None:
        step, now = _step(checkpoint), time.monotonic()
        if self._error is None or now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            self._event("backup_failed", step=step, store=self._target, error=error)
            self._message(
                f"warning: step {step}: checkpoint saved, but not copied to {self._target} ({error}); it is tried again"
            )
        with self._lock:
            self._copying, self._error = None, error
            if self._is_permanent(checkpoint) or not any(_step(path) > _step(checkpoint) for path in self._waiting):
                self._waiting.append(checkpoint)

    def _prune(self, checkpoint: Path, store: Store) -> None:
        run = checkpoint.parent.parent
        try:
            prune_backups(run, store, self._settings.keep_last, self._settings.keep_every)
        except Exception as error:  # every store raises its own errors
            self._message(
                f"step {_step(checkpoint)}: checkpoint copied, but an old copy could not be removed "
                f"({sentence_of(error)})"
            )

    def _is_permanent(self, checkpoint: Path) -> bool:
        """Whether the run folder keeps it for good, so that it can be copied later."""
        every = self._settings.keep_every or 0
        return every > 0 and _step(checkpoint) % every == 0


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _bytes(checkpoint: Path) -> int:
    with suppress(OSError):  # the copy reports that it is gone
        return sum(file.stat().st_size for file in checkpoint.iterdir())
    return 0
