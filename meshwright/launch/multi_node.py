"""A run on several machines: each starts its own ranks under torch's agent."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from meshwright.errors import UserError
from meshwright.job import LoadedJob
from meshwright.launch.devices import require_devices
from meshwright.launch.elastic import ended_by, remove_empty, run_agent
from meshwright.launch.failures import NoMeetingPoint
from meshwright.launch.nodes import MEETING_S, Node
from meshwright.launch.signals import STOP_FILE as STOP_FILE_VARIABLE
from meshwright.launch.worker import STOP_FILE
from meshwright.layout import require_layout
from meshwright.runs import RunFolder
from meshwright.runs.huggingface import fetch_unless_resumed
from meshwright.runs.lifecycle import OnEnd, create_folder, made_for_backup, record_failure, require_room, run_path
from meshwright.runs.outbox import disk_errors
from meshwright.runs.output import log_lost_output

_POLL_S = 0.2


def launch_node(
    loaded: LoadedJob, nproc: int, node: Node, arguments: Sequence[str], on_end: OnEnd = lambda path: None
) -> RunFolder:
    """Train this machine's ranks of a run on several; failures are raised as by `launch`, on every machine with some.

    The run folder was created on submission, or else the first machine creates it where all machines can see it.
    """
    require_layout(loaded.job, nproc * node.nodes)
    require_devices(loaded.job, nproc)
    folder = _folder(loaded, node)
    fetch_unless_resumed(loaded.job, folder.path)  # once on every machine, before its ranks start
    logs = folder.path / "logs"
    logs.mkdir(exist_ok=True)
    log_lost_output(folder, f"launcher{node.suffix}")
    before = _newest_attempt(folder)
    try:
        run_agent(loaded.job, folder.path, nproc, arguments, node)
    except ChildFailedError as error:
        cause = ended_by(error, logs)
        # A machine that the others had given up may wake long after a later attempt has begun.
        if folder.state() == "running" and _newest_attempt(folder) <= before + 1:
            record_failure(folder, cause, str(cause), on_end)
        raise cause from None
    except (dist.DistError, RendezvousError) as error:
        raise NoMeetingPoint(f"--master {node.master}", error) from None
    finally:
        for rank in range(node.rank * nproc, (node.rank + 1) * nproc):
            remove_empty(logs.glob(f"rank-{rank}.*"))
    return folder


def _newest_attempt(folder: RunFolder) -> int:
    return max((event.get("attempt", 0) for event in folder.events("start")), default=-1)


def _folder(loaded: LoadedJob, node: Node) -> RunFolder:
    """The run's folder: the first machine creates it and removes what a killed attempt left, the others wait for it.

    No rank can see what is removed, as ranks start only once all machines are connected.
    """
    path = run_path(loaded, resume=True)
    if node.rank > 0:
        _wait_for(path, MEETING_S)
    elif RunFolder.is_free(path):
        require_room(loaded.job, path, resume=True)
        if not made_for_backup(loaded, path, resume=True):
            create_folder(loaded, path)
    elif STOP_FILE_VARIABLE not in os.environ:  # else a script has removed them, and may have asked to stop since
        for left in [*(path / "logs").glob("*.error.json"), path / STOP_FILE]:
            with disk_errors(path):
                left.unlink(missing_ok=True)
    return RunFolder.open(path)


def _wait_for(path: Path, most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while not (path / "job.resolved.json").is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f'run.folder = "{path}" did not appear here within {most_s:.0f} s; the first machine creates it: use a '
                "disk that all machines share"
            )
        time.sleep(_POLL_S)
