"""Saving while training continues: stage, write in the background, agree that all ranks have written, rename.

What the ranks must agree on (that all have written, that some failed, that it is time) travels with the numbers they
exchange in every step anyway; only at the end of a run does this module communicate by itself.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from meshwright.atomic import sync
from meshwright.checkpoint.backup_thread import BackupThread
from meshwright.checkpoint.catalogue import bring_into_sight, checkpoint_path, remove, surplus
from meshwright.checkpoint.interval import Interval
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.records import Facts, Part, State
from meshwright.checkpoint.retries import tries
from meshwright.checkpoint.shares import seal, write_share
from meshwright.checkpoint.staging import Allocate, Staging
from meshwright.checkpoint.store import sentence_of
from meshwright.errors import UserError
from meshwright.job import Job


@dataclass
class _Save:
    """One checkpoint being saved."""

    facts: Facts
    folder: Path
    began: float
    waited_s: float
    """For the save before it."""
    pause_s: float = 0.0
    write_s: float = 0.0
    written: bool = False
    error: str | None = None

    @property
    def step(self) -> int:
        return self.facts.step


class Saver:
    """One rank's part in saving a run's checkpoints."""

    def __init__(
        self,
        job: Job,
        lease: Lease,
        event: Callable[..., None],
        message: Callable[[str], None],
        allocate: Allocate,
        *,
        rank: int = 0,
        ranks: int = 1,
        sums: Callable[[Sequence[float]], list[float]] = list,
        saved_step: int | None = None,
        flush: Callable[[], object] = lambda: None,
        alive: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """`event` and `message` report how a save ended, `sums` adds up numbers over all ranks; `saved_step` is the
        step the run was resumed from. `flush` writes the rows of the steps so far to disk, which must be there
        before the checkpoint that follows them; `alive` is called with the phase while the last save waits for disk
        space or for the backup."""
        self._job, self._settings, self._lease = job, job.checkpoint, lease
        self._event, self._message = event, message
        self._rank, self._ranks, self._sums = rank, ranks, sums
        self._flush, self._alive = flush, alive
        self._staging, self._prepared = Staging(allocate), False
        mtbf_hours = job.cluster.mtbf_hours
        self._interval = Interval(self._settings, None if mtbf_hours is None else 3600.0 * mtbf_hours)
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None
        self._backup: BackupThread | None = None
        if rank == 0 and self._settings.backup_to is not None:
            self._backup = BackupThread(self._settings, self._event_later, self._message_later)
        self.backup_missing: str | None = None
        """After `finish`, on rank 0: why the last checkpoint has no backup; None if it has one, or needs none."""
        self._reports: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Reports of other threads, for the training thread to print."""
        self._due = False
        self._good_step = saved_step
        self._failure: str | None = None

    def ballot(self) -> list[float]:
        """This rank's share of what is agreed on in a step: has written, has failed, wants a save."""
        save = self._save
        wants = self._rank == 0 and self._interval.due_by_time()
        if save is None:
            return [0.0, 0.0, float(wants)]
        return [float(save.written and save.error is None), float(save.error is not None), float(wants)]

    def count(self, totals: Sequence[float]) -> None:
        """Take the sums of all ballots: a save that all ranks have written becomes a checkpoint."""
        written, failed, wanted = totals
        self._due = wanted > 0
        self._lease.require()
        if self._save is not None and written + failed == self._ranks:
            self._settle(self._save, int(failed))
        self._tell()

    def due(self, step: int) -> bool:
        """Whether `after_step` will start a save."""
        return self._due or self._interval.due_at(step)

    def after_step(self, step: int, capture: Callable[[], State]) -> None:
        """Start a save if one is due; after the first step, prepare for it in the background."""
        if self.due(step):
            self._begin(capture)
        elif not self._prepared and self._interval.will_save:
            self._run(self._prepare, [part.values.nbytes for part in capture().parts])
        self._prepared, self._due = True, False

    def finish(self, step: int, capture: Callable[[], State]) -> Path:
        """Save the last state unless that was done, and wait until it is safe; if the disk is full, wait for space.
        All ranks call this together."""
        self._wait()
        lacking = self._lacks(step)
        for _ in tries(lambda: self._alive("waiting for disk space")):
            if lacking:
                self._begin(capture)
                self._wait()
                lacking = self._lacks(step)
            if not lacking:  # asked before the next try, which would first pause
                break
        self._finish_backup()
        self._tell()
        if lacking:
            raise UserError(
                f"run.folder = {self._lease.run}: the last checkpoint could not be written "
                f"({self._failure or 'another rank failed'}); free disk space and run again with --resume"
            )
        return checkpoint_path(self._lease.run, step)

    def settle(self) -> None:
        """Wait for a save in progress; all ranks call this together."""
        self._wait()
        if self._backup is not None:
            self._backup.stop()

    def abandon(self) -> None:
        """After training failed: wait for a save in progress if it needs no other rank."""
        if self._ranks == 1:
            self._wait()

    def _lacks(self, step: int) -> bool:
        """Whether a step's checkpoint is missing, as rank 0 sees it."""
        [lacking] = self._sums([float(self._rank == 0 and self._good_step != step)])
        return lacking > 0

    def _finish_backup(self) -> None:
        """Wait, within a limit, until the last checkpoint is copied.

        All ranks take part in every moment of the wait: a watchdog takes a rank that waits in one sum for a hang.
        """
        if self._settings.backup_to is None:
            return
        backup = None if self._good_step is None else self._backup
        if backup is not None:
            backup.begin_last(checkpoint_path(self._lease.run, self._good_step or 0))
        waiting = 1.0
        while waiting:
            [waiting] = self._sums([float(backup is not None and backup.waits())])
            self._alive("waiting for the backup")
            self._tell()
        if backup is not None:
            self.backup_missing = backup.missing()
            self._prune(self._good_step or 0)

    def _begin(self, capture: Callable[[], State]) -> None:
        asked = time.perf_counter()
        self._wait()  # one at a time: there is one buffer
        began = time.perf_counter()
        state = capture()
        folder = self._lease.folder / f"step-{state.facts.step:08d}"
        save = _Save(state.facts, folder, began, began - asked)
        staged = self._staging.stage(state.parts)
        save.pause_s = time.perf_counter() - began
        self._interval.saved()
        self._save = save
        self._run(self._write, save, staged, state.held)

    def _prepare(self, sizes: Sequence[int]) -> None:
        """In a thread: the memory for copies, which for a large state takes seconds to allocate and page-lock."""
        with suppress(Exception):  # the first save tries again and reports it
            self._staging.prepare(sizes)

    def _write(self, save: _Save, parts: list[Part], held: Sequence[str]) -> None:
        """In the writing thread: this rank's share."""
        began = time.perf_counter()
        try:
            save.folder.mkdir(exist_ok=True)
            _require_space(save.folder, sum(part.values.nbytes for part in parts))
            write_share(save.folder, parts, self._rank, self._ranks, held)
            sync(save.folder)
            save.write_s = time.perf_counter() - began
            save.written = True
        except Exception as error:  # whatever it is, training continues
            report = sentence_of(error)
            with suppress(OSError):
                for file in save.folder.glob("*" if self._ranks == 1 else f"*-rank{self._rank:05d}*"):
                    file.unlink()  # space for what the run writes meanwhile
                (save.folder / f"failed-{self._rank:05d}").write_text(report)
            save.error = report

    def _settle(self, save: _Save, failed: int) -> None:
        self._save = None
        if self._rank != 0:
            return
        if not failed:
            self._flush()
            self._run(self._commit, save)
            return
        report = self._whose_failure(save)
        shutil.rmtree(save.folder, ignore_errors=True)
        self._failed(save, report)

    def _whose_failure(self, save: _Save) -> str:
        """The first rank that failed and its error; a full disk may have stored the file without its text."""
        report = {} if save.error is None else {self._rank: save.error}
        with suppress(OSError):
            for note in sorted(save.folder.glob("failed-*")):
                report.setdefault(int(note.name[-5:]), note.read_text(errors="replace"))
        rank = min(report, default=0)
        who = f"rank {rank}: " if report and self._ranks > 1 else ""
        return who + (report.get(rank) or "its share could not be written")

    def _commit(self, save: _Save) -> None:
        """On rank 0, in its writing thread: complete the checkpoint, publish it, remove old ones."""
        final = checkpoint_path(self._lease.run, save.step)
        try:
            job = self._job.model_dump(mode="json")
            manifest = seal(save.folder, save.facts, self._lease.attempt, self._ranks, job)
            sync(save.folder)
            bring_into_sight(save.folder, final)
        except Exception as error:
            shutil.rmtree(save.folder, ignore_errors=True)
            self._failed(save, sentence_of(error))
            return
        self._good_step = save.step
        total_s = time.perf_counter() - save.began
        self._interval.measured(save.pause_s, total_s)
        size = sum(record.bytes for record in manifest.files.values())
        seconds = {"pause_s": save.pause_s, "waited_s": save.waited_s, "write_s": save.write_s, "total_s": total_s}
        fields = {"bytes": size, **{name: round(value, 6) for name, value in seconds.items()}}
        place = str(final.relative_to(self._lease.run))
        if self._backup is not None:
            self._backup.offer(final)
        self._event_later("checkpoint", step=save.step, path=place, **fields)
        self._prune(save.step)

    def _prune(self, step: int) -> None:
        """Remove old checkpoints, except those that are being copied."""
        in_use = set() if self._backup is None else self._backup.in_use()
        try:
            old = surplus(self._lease.run, self._settings.keep_last, self._settings.keep_every)
            remove(path for path in old if path not in in_use)
        except (OSError, UserError) as error:
            reason = sentence_of(error)
            self._message_later(f"step {step}: checkpoint saved, but an old one could not be removed ({reason})")

    def _failed(self, save: _Save, error: str) -> None:
        self._failure = error
        kept = "none is complete yet" if self._good_step is None else f"the last complete one is step {self._good_step}"
        text = f"warning: the checkpoint of step {save.step} failed ({error}); training continues, {kept}"
        self._event_later("checkpoint_failed", step=save.step, error=error)
        self._message_later(text)

    def _wait(self) -> None:
        """Wait until this rank, and during a save every rank, has nothing left to do."""
        if self._thread is not None:
            self._thread.join()
        if self._save is not None:
            self.count(self._sums(self.ballot()))
            if self._thread is not None:
                self._thread.join()
        self._tell()

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        self._thread = _started(work, *arguments)

    def _event_later(self, kind: str, **fields: Any) -> None:
        self._reports.put(lambda: self._event(kind, **fields))

    def _message_later(self, text: str) -> None:
        self._reports.put(lambda: self._message(text))

    def _tell(self) -> None:
        while not self._reports.empty():
            self._reports.get()()


def _started(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    # A daemon: a run that fails exits at once, and the next attempt removes what was not finished.
    thread = threading.Thread(target=work, args=arguments, name="checkpoint", daemon=True)
    thread.start()
    return thread


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the disk has {free / 1e6:,.1f} MB free but this needs {needed / 1e6:,.1f} MB")
