"""A run on several machines: each starts its own ranks under torch's agent."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from meshwright.job import LoadedJob
from meshwright.launch.devices import require_devices
from meshwright.launch.elastic import ended_by, run_agent
from meshwright.launch.failures import NoMeetingPoint
from meshwright.launch.nodes import Node
from meshwright.layout import require_layout
from meshwright.runs import RunFolder
from meshwright.runs.huggingface import fetch_unless_resumed
from meshwright.runs.lifecycle import OnEnd, record_failure, run_path


def launch_node(
    loaded: LoadedJob, nproc: int, node: Node, arguments: Sequence[str], on_end: OnEnd = lambda path: None
) -> RunFolder:
    """Train this machine's ranks of a run on several; the run folder exists already, created on submission.

    Failures are raised as by `launch`, on every machine that has some; a script has removed files of earlier jobs.
    """
    require_layout(loaded.job, nproc * node.nodes)
    require_devices(loaded.job, nproc)
    folder = RunFolder.open(run_path(loaded, resume=True))
    fetch_unless_resumed(loaded.job, folder.path)  # once on every machine, before its ranks start
    logs = folder.path / "logs"
    logs.mkdir(exist_ok=True)
    try:
        run_agent(loaded.job, folder.path, nproc, arguments, node)
    except ChildFailedError as error:
        cause = ended_by(error, logs)
        if folder.state() == "running":
            record_failure(folder, cause, str(cause), on_end)
        raise cause from None
    except (dist.DistError, RendezvousError) as error:
        raise NoMeetingPoint(f"--master {node.master}", error) from None
    finally:
        for rank in range(node.rank * nproc, (node.rank + 1) * nproc):
            for log in logs.glob(f"rank-{rank}.*"):
                if not log.stat().st_size:
                    log.unlink()
    return folder
