"""A rank's heartbeat: a thread that reports where the main thread is, and dumps every stack on request."""

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Self

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import meshwright
from meshwright.train import Activity

WATCH = "MESHWRIGHT_WATCH"
"""Set for ranks that our own launcher started with run.watchdog_s: its HOST:PORT."""
ANSWER_S = 5.0
"""A store that does not answer within this time is unreachable."""
_PACKAGE = Path(meshwright.__file__).parent
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")


@dataclass(frozen=True)
class Beat:
    """What a rank reports about itself."""

    number: int
    """Grows with every beat: if it stops, the whole process hangs."""
    moves: int
    """Grows with every phase: if it stops, the main thread hangs."""
    step: int
    phase: str
    place: str
    """The innermost line of our own code in the main thread."""
    collective: str | None
    """The torch.distributed call the main thread waited in, if any."""
    warm: bool
    pid: int
    host: str
    done: bool = False
    """The rank has exited normally."""

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Parse the beat a rank left in the store."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        waiting = f", in {self.collective}" if self.collective else ""
        return f"step {self.step}, {self.phase}{waiting} at {self.place}"


class Board:
    """Where ranks leave their beats and stacks for each other: a torch store."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("alive", store)

    @classmethod
    def at(cls, address: str) -> Self:
        """The board of a store that listens at this address."""
        host, _, port = address.rpartition(":")
        wait = timedelta(seconds=ANSWER_S)
        return cls(TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait))

    def beat(self, rank: int, beat: Beat) -> None:
        """Write a beat."""
        self._store.set(f"beat/{rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: int) -> dict[int, Beat]:
        """The last beat of every rank that wrote one."""
        found = {}
        for rank in range(ranks):
            if self._store.check([f"beat/{rank}"]):
                found[rank] = Beat.parse(self._store.get(f"beat/{rank}"))
        return found

    def ask_for_stacks(self, alarm: int) -> None:
        """Ask every rank that still beats for its stacks; each of several alarms has its own number."""
        self._store.set("alarm", str(alarm))

    def alarm(self) -> int:
        """The number of the last alarm; 0 before the first."""
        return int(self._store.get("alarm")) if self._store.check(["alarm"]) else 0

    def show_stacks(self, alarm: int, rank: int, text: str) -> None:
        """Write a rank's stacks."""
        self._store.set(f"stacks/{alarm}/{rank}", text)

    def stacks(self, alarm: int, ranks: int) -> dict[int, str]:
        """The stacks written so far."""
        shown = (rank for rank in range(ranks) if self._store.check([f"stacks/{alarm}/{rank}"]))
        return {rank: self._store.get(f"stacks/{alarm}/{rank}").decode(errors="replace") for rank in shown}


class Heartbeat:
    """Beats until stopped, and reads the others' beats: only this thread waits for a store that may be unreachable."""

    def __init__(self, board: Board, rank: int, ranks: int, activity: Activity, watchdog_s: float) -> None:
        self._board, self._rank, self._ranks, self._activity = board, rank, ranks, activity
        self._interval_s = beat_interval_s(watchdog_s)
        self.curious = False
        """Set to read the others' beats."""
        self.alarmed = False
        """Set to request and read everyone's stacks."""
        self.others: dict[int, Beat] = {}
        self.shown: dict[int, str] = {}
        self.heard_at = time.monotonic()
        """When the store last answered."""
        self._stopped = threading.Event()
        self._answered, self._cut_off = 0, False
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._number = 0

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self) -> None:
        """Report that the rank exits normally, and stop beating."""
        self._stopped.set()
        self._thread.join(timeout=ANSWER_S)
        if not self._cut_off:
            with suppress(RuntimeError):
                self._board.beat(self._rank, replace(self._beat(), done=True))

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._exchange()
            except RuntimeError:  # from torch: the process with the store is gone, and there is no reconnecting
                self._cut_off = True
                return
            self.heard_at = time.monotonic()

    def _exchange(self) -> None:
        self._board.beat(self._rank, self._beat())
        if self.alarmed:
            self._board.ask_for_stacks(1)
        if (alarm := self._board.alarm()) > self._answered:
            self._answered = alarm
            self._board.show_stacks(alarm, self._rank, stacks())
        if self.curious:
            self.others = self._board.beats(self._ranks)
        if self.alarmed:
            self.shown = self._board.stacks(1, self._ranks)

    def _beat(self) -> Beat:
        activity = self._activity
        self._number += 1
        place, collective = _whereabouts(sys._current_frames().get(threading.main_thread().ident or 0))
        here = (os.getpid(), socket.gethostname())
        return Beat(
            self._number, activity.moves, activity.step, activity.phase, place, collective, activity.warm, *here
        )


def beat_interval_s(watchdog_s: float) -> float:
    """Often enough to notice silence well within the watchdog's time."""
    return min(1.0, watchdog_s / 15.0)


def stacks() -> str:
    """Every thread's Python stack, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def _whereabouts(frame: FrameType | None) -> tuple[str, str | None]:
    """The innermost line of our own code, and the collective it called."""
    collective = None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if collective is None and file.name in _COLLECTIVES:
            collective = frame.f_code.co_name
        if file.is_relative_to(_PACKAGE):
            return f"{file.relative_to(_PACKAGE.parent)}:{frame.f_lineno}", collective
        frame = frame.f_back
    return "its start", collective
