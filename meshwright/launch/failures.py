"""What a failed rank writes to its error file, and how all of these become one sentence."""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import meshwright
from meshwright.atomic import write_atomic
from meshwright.data import WorkerDied
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.rank_failure import RankFailure
from meshwright.parallel import fails_without_table, table_error, uses_own_table
from meshwright.train import Activity, OutOfMemory

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# gloo raises plain RuntimeErrors, which can only be recognized by their text.
_LOST_PEER = ("by peer", "Connection refused", "Broken pipe", "connectFullMesh", "Timed out", "pair closure")


_COMPUTING = ("building the model", "evaluation", "forward and backward")
"""Phases in which a wrong sharding table shows."""
_LOGS_TRACEBACKS = "torch._subclasses.fake_tensor"
"""Shapes that do not match are logged here before they are raised."""


class NoMeetingPoint(RankFailure):
    """The ranks never connected: the rendezvous port is taken, or nobody answered there."""

    def __init__(self, place: str, error: Exception) -> None:
        report = " ".join(str(error.__cause__ or error).split())
        if "EADDRINUSE" in report:
            report = "the port is in use"
        sentence = (
            f"the ranks cannot connect at {place} ({report}); check that all machines are up, or give another port"
        )
        super().__init__(sentence, None, "".join(traceback.format_exception(error)))


class Hang(RankFailure):
    """Ranks hang; the first one to blame is named, with all stacks that could be collected."""


@contextmanager
def failures_written_down() -> Iterator[None]:
    """Write an error that ends this rank to the file its launcher named, before its peers notice that it died."""
    try:
        yield
    except Exception as error:
        write_failure(error)
        raise


@contextmanager
def table_errors_explained(job: Job, activity: Activity) -> Iterator[None]:
    """Turn an error before the first step is done into a sentence about the model's own sharding table.

    Not if another rank or the system caused it, or if the model fails without the table, too.
    """
    if not uses_own_table(job):
        yield
        return
    logger = logging.getLogger(_LOGS_TRACEBACKS)
    logger.disabled = True
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        early = not activity.warm and activity.phase in _COMPUTING
        if not early or _lost_peer(error) or fails_without_table(job):
            raise
        raise table_error(job, error) from error
    finally:
        logger.disabled = False


def write_failure(error: Exception) -> None:
    """Write an error to the file the launcher named, if any."""
    if path := os.environ.get(ERROR_FILE):
        # The agent itself fails on a half-written file; on a full disk the exit code still says enough.
        with suppress(OSError):
            write_atomic(Path(path), json.dumps(_described(error)))


def leave(code: int) -> NoReturn:
    """Exit a failed rank at once: an orderly torch shutdown takes seconds while its peers and launcher wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _described(error: Exception) -> dict[str, Any]:
    """The fields torch's agents read, plus ours; the monotonic clock orders the failures."""
    mistake = isinstance(error, UserError)
    report = str(error) if mistake else f"{type(error).__name__}: {error}"
    callstack = "".join(traceback.format_exception(error))
    # torchrun prints py_callstack; a user error needs none.
    extra = {"py_callstack": report if mistake else callstack, "timestamp": time.time()}
    return {
        "message": {"message": report, "extraInfo": extra},
        "callstack": callstack,
        "users_mistake": mistake,
        "out_of_memory": isinstance(error, OutOfMemory),
        "clock": time.monotonic(),
        "lost_peer": _lost_peer(error),
        "place": _place(error),
    }


def _lost_peer(error: Exception) -> bool:
    """Whether this looks like a consequence of another rank's death."""
    if isinstance(error, WorkerDied):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)
    )


def _place(error: Exception) -> str:
    """The innermost line of our own code in the traceback: torch's own files do not show the cause."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(meshwright.__file__).parent
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(package)] or list(frames)
    if not own:
        return "its start"
    path = Path(own[-1].filename)
    shown = path.relative_to(package.parent) if path.is_relative_to(package) else path
    return f"{shown}:{own[-1].lineno}"


def explain(failures: dict[int, ProcessFailure], logs: Path, ranks: int | None = None) -> UserError | RankFailure:
    """The cause among the failures of some ranks; each traceback goes to its rank's log.

    If the number of ranks is given, a rank that is not among the failures has exited with code 0: the agent kills all
    that still run, and counts them as failures.
    """
    for rank, failure in failures.items():
        if callstack := _callstack(failure):
            with suppress(OSError), _log(rank, failure, logs).open("a", encoding="utf-8") as file:
                file.write(callstack)
    left = sorted(set(range(ranks or 0)) - set(failures))
    if left and all(_is_echo(failure) for failure in failures.values()):
        sentence = f"rank {left[0]} exited with code 0 before the run was over, and its peers lost it"
        return RankFailure(sentence, left[0], "")
    rank = _first(failures)
    failure = failures[rank]
    written = failure.error_file_data
    message = failure.message
    report = str(message["message"]) if isinstance(message, dict) else str(message)
    if written.get("users_mistake"):
        mistake = OutOfMemory(f"rank {rank}: {report}") if written.get("out_of_memory") else UserError(report)
        mistake.add_note(_callstack(failure))  # shown by --debug
        return mistake
    if isinstance(message, dict):
        how = f"failed at {written.get('place', 'an unknown line')}: {report.splitlines()[0]}"
    elif failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
        how += " (the system does this when memory runs out)" if failure.signal_name() == "SIGKILL" else ""
    else:
        how = f"exited with code {failure.exitcode} and no error message"
    log = _log(rank, failure, logs)
    where = f"its log is {log}" if log.is_file() and log.stat().st_size else "it left no log"
    return RankFailure(f"rank {rank} {how}; {where}", rank, _callstack(failure))


def _first(failures: dict[int, ProcessFailure]) -> int:
    """The rank that failed first: one with an error of its own, else one killed by a signal, else the agent's first.

    A killed rank leaves no time of death, and its peers' errors come first; the agent itself ends the others with
    SIGTERM.
    """

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if isinstance(failure.message, dict) and not failure.error_file_data.get("lost_peer"):
            return 0, failure.error_file_data.get("clock", 0.0)
        if not isinstance(failure.message, dict) and failure.signal_name() != "SIGTERM":
            return 1, 0.0
        return 2, 0.0

    return min(failures, key=order)


def _log(rank: int, failure: ProcessFailure, logs: Path) -> Path:
    """A rank's log is next to its error file; of a killed rank, which leaves no such file, it is the newest."""
    name = Path(failure.error_file).name
    if name.endswith(".error.json"):
        return logs / name.replace(".error.json", ".err")
    written = [*logs.glob(f"rank-{rank}.err"), *logs.glob(f"rank-{rank}.restart-*.err")]
    return max(written, key=lambda path: path.stat().st_mtime_ns, default=logs / f"rank-{rank}.err")


def _is_echo(failure: ProcessFailure) -> bool:
    """Whether a rank only reported a lost peer, or was ended by the agent."""
    if isinstance(failure.message, dict):
        return bool(failure.error_file_data.get("lost_peer"))
    return failure.signal_name() == "SIGTERM"


def _callstack(failure: ProcessFailure) -> str:
    return str(failure.error_file_data.get("callstack", ""))
