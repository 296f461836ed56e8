"""A disk that is full, over its quota or broken for a while, in the middle of a training run."""

import contextlib
import ctypes
import errno
import io
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, InternalError
from attacks.tiny_run import finished, in_child, left_alone, require_equal, train
from meshwright.errors import UserError

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
CALLS = 120  # about as many writes, renames and the like as a run makes
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def draw(chance: random.Random) -> Iterator[Case]:
    """Writes that fail one after the other, and in one of ten a real disk that is filled."""
    left_alone()
    while True:
        if os.geteuid() == 0 and chance.random() < 0.2:
            begin, hold = chance.uniform(0.02, 0.6), chance.uniform(0.02, 0.5)
            name = f"a disk filled after {begin:.2f} s for {hold:.2f} s"
            yield Case(name, partial(_run, Filled(begin, hold)), seconds=60.0)
            continue
        number, first = chance.choice(ERRORS), chance.randrange(CALLS)
        count = chance.choice((1, 2, 5, 20, 60, 1000))
        name = f"{errno.errorcode[number]} at {count} calls from {first}"
        yield Case(name, partial(_run, Refusing(number, first, count)), seconds=60.0)


def _run(trouble: "Refusing | Filled", folder: Path) -> None:
    """A run that finishes is equal; one that gives up says why, and resumes to an equal end once there is space."""

    def work() -> None:
        with trouble, contextlib.suppress(UserError):
            train()
        if not finished():
            train(resume=True)
        require_equal(Path("run"))

    if why := in_child(work)[1]:
        raise InternalError(why)


class Refusing:
    """From the `first` call that changes the disk on, `count` of them fail; a write stores some bytes first."""

    def __init__(self, number: int, first: int, count: int) -> None:
        self.number, self.first, self.last, self.calls = number, first, first + count, 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        from meshwright.checkpoint import retries

        retries.WAITS_S = (0.01,) * 5
        for name in ("write", "rename", "replace", "mkdir", "fsync"):
            setattr(os, name, partial(self._call, getattr(os, name)))
        trouble = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                trouble.check()
                return super().write(data)

        real = io.open

        def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
            if set(mode) <= set("rbt"):
                return real(file, mode, buffering, *rest, **named)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)

        io.open = opened  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        self.last = 0

    def check(self) -> None:
        with self.lock:
            self.calls += 1
            fails = self.first <= self.calls < self.last
        if fails:
            raise OSError(self.number, os.strerror(self.number))

    def _call(self, real: Any, *given: Any, **named: Any) -> Any:
        try:
            self.check()
        except OSError:
            if real.__name__ == "write":
                real(given[0], bytes(given[1])[:7])  # a full disk stores the beginning of a row
            raise
        return real(*given, **named)


class Filled:
    """The working directory on its own small disk, which someone else fills for a while."""

    def __init__(self, begin: float, hold: float) -> None:
        self.begin, self.hold = begin, hold
        self.thread: threading.Thread | None = None

    def __enter__(self) -> None:
        from meshwright.checkpoint import retries

        retries.WAITS_S = (0.1,) * 20
        libc = ctypes.CDLL(None, use_errno=True)
        # In a mount namespace of this process, which goes with it.
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
            return
        here = Path("disk").absolute()
        here.mkdir()
        if libc.mount(b"tmpfs", b"disk", b"tmpfs", 0, b"size=1500k"):
            return
        os.chdir(here)
        self.thread = threading.Thread(target=self._fill, args=(here / "filler",), daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.thread.join()

    def _fill(self, filler: Path) -> None:
        time.sleep(self.begin)
        with filler.open("wb", buffering=0) as file:
            until = time.monotonic() + self.hold
            while time.monotonic() < until:
                try:
                    file.write(bytes(4096))
                except OSError:
                    time.sleep(0.01)
        filler.unlink()


FULL_DISK = Family("full disk", draw, weight=0.5)
