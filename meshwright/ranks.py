"""Which rank this process is, according to torchrun, srun or our own launcher, and how it ends. Imports no torch."""

import atexit
import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from meshwright.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_REMEDY = "unset it, or start with torchrun or srun"
_FIRST_PORT, _PORTS = 15_000, 16_000  # below the range of ephemeral ports


@dataclass(frozen=True)
class Place:
    """One rank's place among the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    """Ranks on this machine; None if unknown."""


ALONE = Place(0, 1, 0, 1)


def own_place() -> Place | None:
    """This process's place, with srun's variables translated to torchrun's for later readers; None when alone."""
    os.environ.update(slurm_variables(os.environ))
    return find_place(os.environ)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks, or is alone."""
    return (os.environ.get("RANK") or slurm_variables(os.environ).get("RANK", "0")) == "0"


def find_place(environment: Mapping[str, str]) -> Place | None:
    """This process's place according to torchrun's variables; None when it is alone."""
    numbers = {name: _number(environment, name) for name in _VARIABLES if name in environment}
    if not numbers:
        return None
    for name in ("RANK", "WORLD_SIZE"):
        if name not in numbers:
            raise UserError(f"{next(iter(numbers))} is set but {name} is not; {_REMEDY}")
    place = Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers.get("LOCAL_RANK", 0), numbers.get("LOCAL_WORLD_SIZE"))
    if place.rank >= place.size:
        raise UserError(f"RANK = {place.rank} is not below WORLD_SIZE = {place.size}; {_REMEDY}")
    if place.size < 2 and "MESHWRIGHT_RUN_FOLDER" not in environment:
        return None
    if "LOCAL_RANK" not in numbers:
        raise UserError("RANK and WORLD_SIZE are set but LOCAL_RANK is not; set it, or start with torchrun or srun")
    limit = "WORLD_SIZE" if place.local_size is None else "LOCAL_WORLD_SIZE"
    if place.local_rank >= numbers[limit]:
        raise UserError(f"LOCAL_RANK = {place.local_rank} is not below {limit} = {numbers[limit]}; {_REMEDY}")
    return place


def require_master(environment: Mapping[str, str]) -> None:
    """Refuse a missing or impossible address of the ranks' rendezvous."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(f"RANK and WORLD_SIZE are set but {name} is not; set it, or start with torchrun or srun")
    if not 0 < _number(environment, "MASTER_PORT") < 2**16:
        port = environment["MASTER_PORT"]
        raise UserError(f"MASTER_PORT = {port} is not a port; set a free one from 1 to 65535, the same for every rank")


def _number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", environment[name]):
        raise UserError(f"{name} = {environment[name][:40]} is not a number from 0 on; {_REMEDY}")
    return int(environment[name])


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task that srun started; none outside a step of several tasks.

    A batch script itself has Slurm's rank variables too, but no step: there `--nproc` still starts the ranks.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or int(size) < 2:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    # Two steps of a job may run at once and must not share a port.
    number = int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    number += 101 * int(
        environment.get("SLURM_RESTART_COUNT", "0")
    )  # if a port was taken, use another after the restart
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + number % _PORTS),
    }


def first_host(nodes: str) -> str:
    """The first machine of Slurm's compressed list: `gpu[07-09,12],login1` starts with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)


def end_rank(code: int) -> NoReturn:
    """End a rank's process: all that Python does at exit, except to take its interpreter down.

    While it did, one of gloo's threads could let go of the last message's tensor, ask for the interpreter's lock, and
    abort a process whose work is done (torch 2.13 with Python 3.11; from Python 3.14 on such a thread just stops).
    """
    threads: Any = threading
    threads._shutdown()  # waits for threads and pools of threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
