"""The watchdog: a hang is detected within run.watchdog_s, reported with all available stacks, and ended.

Ranks of our own launcher are watched by it. Under torchrun or srun the ranks watch each other: a rank that hangs
checks the others' beats, and all that can exit do.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshwright.launch.failures import Hang, write_failure
from meshwright.launch.heartbeat import ANSWER_S, WATCH, Board, Heartbeat, beat_interval_s
from meshwright.launch.stalls import COLD, COLDEST_S, VERDICT, Stall, StallDetector
from meshwright.ranks import Place
from meshwright.runs import RunFolder
from meshwright.train import Activity

LOOK, _UNHEARD, _STACKS = 0.1, 0.4, 0.1
"""Fractions of run.watchdog_s: when a hanging rank checks the others, early enough to see their silence before its
verdict; when it considers their store lost; and how long to wait for stacks."""

RECONNECT_S = 900.0
"""How long a rank that is cut off from the others waits for the network before it exits."""


class Watch:
    """The launcher's watchdog over one attempt; a context manager."""

    def __init__(self, folder: RunFolder, ranks: int, watchdog_s: float) -> None:
        self._folder, self._ranks, self._watchdog_s = folder, ranks, watchdog_s
        self.hang: Hang | None = None
        """The hang that was found, after the ranks were killed for it."""
        self._ended = threading.Event()

    @property
    def address(self) -> str:
        """Where the ranks send their beats."""
        return f"127.0.0.1:{self._store.port}"

    def __enter__(self) -> Self:
        wait = timedelta(seconds=ANSWER_S)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        self._board = Board(self._store)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        del self._board, self._store  # frees its port

    def _run(self) -> None:
        detector, alarms = StallDetector(self._ranks, self._watchdog_s), 0
        while not self._ended.wait(beat_interval_s(self._watchdog_s)):
            detector.see(self._board.beats(self._ranks))
            if detector.verdict() is None:
                continue
            alarms += 1
            shown = self._stacks(alarms)
            detector.see(self._board.beats(self._ranks))
            if (verdict := detector.verdict()) is not None:  # no rank has recovered meanwhile
                self._end(verdict, shown)
                return

    def _stacks(self, alarm: int) -> dict[int, str]:
        """The stacks of all ranks that answered in time."""
        self._board.ask_for_stacks(alarm)
        deadline = time.monotonic() + _STACKS * self._watchdog_s
        while time.monotonic() < deadline and len(self._board.stacks(alarm, self._ranks)) < self._ranks:
            time.sleep(beat_interval_s(self._watchdog_s) / 2)
        return self._board.stacks(alarm, self._ranks)

    def _end(self, verdict: Stall, shown: Mapping[int, str]) -> None:
        self.hang = report(self._folder, verdict, shown, self._watchdog_s)
        for rank in verdict.missing if any(rank in verdict.last for rank in verdict.missing) else verdict.last:
            if rank in verdict.last:
                _kill_child(verdict.last[rank].pid)


def report(folder: RunFolder, verdict: Stall, shown: Mapping[int, str], watchdog_s: float) -> Hang:
    """Record a hang: a text with every stack, and an event that names it."""
    logs = folder.path / "logs"
    number = len(list(logs.glob("watchdog-*.txt")))
    sentence = verdict.sentence(watchdog_s)
    text = [sentence, ""]
    text += [f"rank {rank} on {beat.host} (pid {beat.pid}): {beat}" for rank, beat in sorted(verdict.last.items())]
    text += [f"\n--- rank {rank} ---\n{stack}" for rank, stack in sorted(shown.items())]
    place = logs / f"watchdog-{number}.txt"
    where = str(place.relative_to(folder.path))
    with suppress(OSError):  # if the disk cannot be written, the ranks are restarted anyway
        logs.mkdir(exist_ok=True)
        place.write_text("\n".join(text), encoding="utf-8")
    missing = list(verdict.missing)
    seen: dict[str, Any] = {str(rank): str(beat) for rank, beat in verdict.last.items()}
    folder.event("hang", missing=missing, still_s=round(verdict.still_s, 3), last_seen=seen, report=where)
    return Hang(f"{sentence}; all collected stacks are in {place}", verdict.missing[0], "\n".join(text))


@contextmanager
def signs_of_life(watchdog_s: float, place: Place, activity: Activity) -> Iterator["Life"]:
    """While inside, this rank sends heartbeats to whoever watches; without a watchdog it sends none."""
    life = Life(watchdog_s, place, activity)
    if watchdog_s and WATCH in os.environ:
        life.begin(Board.at(os.environ[WATCH]))
    yield life
    life.end()  # not after a failure, which is not a normal exit


class Life:
    """A rank's heartbeat, once there is a store to send it to."""

    def __init__(self, watchdog_s: float, place: Place, activity: Activity) -> None:
        self._watchdog_s, self._place, self._activity = watchdog_s, place, activity
        self._heartbeat: Heartbeat | None = None
        self._peers: _Peers | None = None

    def begin(self, board: Board) -> None:
        """Start beating."""
        self._heartbeat = Heartbeat(board, self._place.rank, self._place.size, self._activity, self._watchdog_s)
        self._heartbeat.start()

    def met(self) -> None:
        """The ranks have connected: unless our own launcher watches them, they watch each other from now on."""
        address = os.environ.get("MASTER_ADDR")
        if not self._watchdog_s or self._heartbeat is not None or self._place.size == 1 or address is None:
            return
        self.begin(Board.at(f"{address}:{os.environ['MASTER_PORT']}"))
        assert self._heartbeat is not None
        self._peers = _Peers(self._heartbeat, self._place, self._activity, self._watchdog_s)
        self._peers.start()

    def found(self, run: Path) -> None:
        """The run folder is known."""
        if self._peers is not None:
            self._peers.run = run

    def end(self) -> None:
        """The rank exits normally."""
        if self._peers is not None:
            self._peers.ended.set()
        if self._heartbeat is not None:
            self._heartbeat.stop()


class _Peers:
    """A rank's own watchdog, for ranks without a launcher of ours."""

    def __init__(self, heartbeat: Heartbeat, place: Place, activity: Activity, watchdog_s: float) -> None:
        self._heartbeat, self._place, self._activity, self._watchdog_s = heartbeat, place, activity, watchdog_s
        self.run: Path | None = None
        self.ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        detector, moves, since = StallDetector(self._place.size, self._watchdog_s), -1, time.monotonic()
        while not self.ended.wait(beat_interval_s(self._watchdog_s)):
            now = time.monotonic()
            if self._activity.moves != moves:
                moves, since = self._activity.moves, now
            patience = 1.0 if self._activity.warm else max(COLD, COLDEST_S / self._watchdog_s)
            still = (now - since) / (self._watchdog_s * patience)
            self._heartbeat.curious = still > LOOK
            if still < LOOK:
                detector = StallDetector(self._place.size, self._watchdog_s)
                continue
            detector.see(self._heartbeat.others)
            if still > VERDICT:
                self._end(detector, now - since)
                return

    def _end(self, detector: StallDetector, still_s: float) -> None:
        cut_off = time.monotonic() - self._heartbeat.heard_at > _UNHEARD * self._watchdog_s
        if cut_off:
            others = tuple(rank for rank in range(self._place.size) if rank != self._place.rank)
            verdict = Stall(others, True, still_s, dict(self._heartbeat.others))  # the network between them is cut
        else:
            verdict = detector.accuse(still_s)
        self._heartbeat.alarmed = True
        time.sleep(_STACKS * self._watchdog_s)
        message = [rank for rank in verdict.last if rank not in verdict.missing]
        hang = Hang(verdict.sentence(self._watchdog_s), verdict.missing[0], "")
        if self.run is not None and self._place.rank == min(message, default=self._place.rank):
            with suppress(Exception):  # an unreachable disk must not keep this process alive
                hang = report(RunFolder.open(self.run), verdict, self._heartbeat.shown, self._watchdog_s)
        write_failure(hang)
        if cut_off:
            _wait_for_store()
        os._exit(1)


def _wait_for_store() -> None:
    """Keep the agent from restarting us while it could not reach the others either: it would not survive that."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + RECONNECT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(where, timeout=2.0).close()
        except OSError:
            time.sleep(0.5)
        else:
            return


def _kill_child(pid: int) -> None:
    """Kill only a child of ours: the pid came over a socket."""
    with suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)
