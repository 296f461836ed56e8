"""Faults of a run: what each does to the process it hits, and how they are injected."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULTS = "MESHWRIGHT_FAULTS"
"""A file that lists the faults of a run; next to it every fault leaves a file when it happens, and does not happen
again."""
RANKS = 2
KINDS = [
    "kill -9 a rank", "exception on a rank", "a rank exits 0 early", "out of memory on a rank", "NaN on a rank",
    "loader worker killed", "SIGSTOP a rank", "a rank stuck outside of collectives",
    "checkpoints turned read-only", "clock +1 h on a rank", "clock -1 h on a rank",
]  # fmt: skip
"""Faults of a rank; the launcher's own are "agent killed" and "rendezvous port taken"."""
HARMLESS = ("checkpoints turned read-only", "clock +1 h on a rank", "clock -1 h on a rank")
"""These need no restart."""


@dataclass(frozen=True)
class Fault:
    """Which fault hits which rank at the start of a step."""

    number: int
    kind: str
    rank: int
    step: int


def strike(fault: Fault, training: Any) -> None:
    """The fault itself, in the rank's main thread."""
    import torch

    if fault.kind == "kill -9 a rank":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exception on a rank":
        raise ValueError(f"fault {fault.number}")
    elif fault.kind == "a rank exits 0 early":
        os._exit(0)
    elif fault.kind == "out of memory on a rank":
        raise torch.OutOfMemoryError(f"fault {fault.number}")
    elif fault.kind == "NaN on a rank":
        whole = training.engine.accumulate

        def poisoned(*given: Any) -> Any:
            training.engine.accumulate = whole
            return whole(*given) * float("nan")

        training.engine.accumulate = poisoned
    elif fault.kind == "loader worker killed":
        import multiprocessing

        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    elif fault.kind == "SIGSTOP a rank":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "a rank stuck outside of collectives":
        time.sleep(3600)
    elif fault.kind.startswith("clock"):
        hours = 1 if "+" in fault.kind else -1
        honest = time.time
        time.time = lambda: honest() + 3600.0 * hours
    elif fault.kind == "agent killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif fault.kind == "checkpoints turned read-only":
        lock(Path("run/checkpoints"), locked=True)


def lock(folder: Path, *, locked: bool) -> None:
    """Allow or forbid changes to a folder; only the immutable attribute stops root."""
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i" if locked else "-i", str(folder)], check=True)
    else:
        folder.chmod(0o500 if locked else 0o700)


READ_ONLY_STEPS = 5


def arm() -> None:
    """In a run's launcher, whose ranks are forked from it: make the listed faults happen, each once."""
    listed = os.environ.get(FAULTS)
    if listed is None or "train" not in sys.argv[:3] + sys.orig_argv[:5]:
        return
    faults = [Fault(**row) for row in json.loads(Path(listed).read_text())]
    for fault in faults:
        if fault.kind == "rendezvous port taken":
            take_port(fault)
    from meshwright.train import Trainer

    step_of = Trainer.step

    def step_with_faults(training: Any, step: int, *given: Any) -> bool:
        for fault in faults:
            if fault.rank != training.world.rank:
                continue
            if fault.step == step and strikes_now(fault):
                strike(fault, training)
            ends = fault.kind == "checkpoints turned read-only" and step == fault.step + READ_ONLY_STEPS
            if ends and struck_at(Path(listed).parent, fault):
                lock(Path("run/checkpoints"), locked=False)
        return step_of(training, step, *given)

    Trainer.step = step_with_faults  # type: ignore[method-assign]


def strikes_now(fault: Fault) -> bool:
    """Whether a fault has not happened before; marks it as happened."""
    try:
        with (Path(os.environ[FAULTS]).parent / f"struck-{fault.number}").open("x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def struck_at(folder: Path, fault: Fault) -> float | None:
    """When a fault happened."""
    file = folder / f"struck-{fault.number}"
    return float(file.read_text()) if file.exists() else None


def take_port(fault: Fault) -> None:
    """In the launcher: make the first rendezvous find a port that another program listens on."""
    from meshwright.launch import elastic

    config = elastic.LaunchConfig

    def with_taken_port(**fields: Any) -> Any:
        if strikes_now(fault):
            other = socket.create_server(("127.0.0.1", 0))
            with_taken_port.kept = other  # type: ignore[attr-defined]
            fields |= {"rdzv_endpoint": f"127.0.0.1:{other.getsockname()[1]}"}
            fields |= {"rdzv_configs": {"is_host": True, "timeout": 5}}
        return config(**fields)

    elastic.LaunchConfig = with_taken_port  # type: ignore[assignment,misc]


def spread(kinds: list[str], first: int = 4, apart: int = 3) -> list[Fault]:
    """Faults one after the other; those of the launcher or only of rank 0 happen there."""
    at_zero = ("agent killed", "checkpoints turned read-only")
    return [
        Fault(number, kind, 0 if kind in at_zero else 1, first + apart * number) for number, kind in enumerate(kinds)
    ]


_LONGER = {"checkpoints turned read-only": READ_ONLY_STEPS, "agent killed": 4}


def at_random(count: int, seed: int, kinds: list[str] = KINDS, apart: int = 4) -> list[Fault]:
    """A number of faults, on any rank."""
    dice = random.Random(seed)
    faults, step = [], 3
    for number in range(count):
        kind = dice.choice([*kinds, "agent killed"])
        rank = 0 if kind in ("agent killed", "checkpoints turned read-only") else dice.randrange(RANKS)
        faults.append(Fault(number, kind, rank, step))
        # The run itself makes a folder writable again, and must not be ended in between: neither by the next fault nor
        # by ranks that have not noticed yet that their launcher died.
        step += dice.randint(2, apart) + _LONGER.get(kind, 0)
    return faults
