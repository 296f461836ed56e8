"""From a job to a supervisor in a Ray cluster: what can be rejected is rejected here, before anything is written."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job import LoadedJob, code_of
from meshwright.launch.ray.connection import NAMESPACE, connect
from meshwright.launch.ray.placement import HEAD, has_gpus, require_resources
from meshwright.launch.ray.record import FOLDER, OVER, State, Submission
from meshwright.launch.ray.status import is_active
from meshwright.launch.ray.supervisor import Supervisor
from meshwright.layout import ranks_of, require_layout
from meshwright.runs.lifecycle import create_folder, require_room, run_path
from meshwright.runs.rehearsed import require_training
from meshwright.version import VERSION

_START_S = 120.0
_DEGREES = ("layout.dp_replicate", "layout.dp_shard")


def submit(
    source: str,
    loaded: LoadedJob,
    address: str | None = None,
    min_ranks: int | None = None,
    ship: bool = False,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> Submission:
    """Start a supervisor that runs a job on a cluster's machines; a run folder as `source` is continued.

    `min_ranks` lets it run on fewer ranks than the layout has; if the supervisor cannot start, nothing is left.
    """
    job = loaded.job
    ranks = ranks_of(job.layout)
    require_layout(job, ranks)
    least = ranks if min_ranks is None else min_ranks
    if least > ranks:
        raise UserError(f"--min-ranks {least} is more than the layout's {ranks} ranks; give at most {ranks}")
    continues = (Path(source) / "job.resolved.json").is_file()
    run = (Path(source) if continues else run_path(loaded)).absolute()
    require_training(run)
    if not continues and (run / "job.resolved.json").is_file():
        raise UserError(
            f'run.folder = "{run}" holds a run; continue it with meshwright submit {run} --on ray, or choose another'
        )
    ray = connect(address, ship)
    nodes = ray.nodes()
    gpus = job.run.device != "cpu" and (job.run.device != "auto" or has_gpus(nodes))
    require_resources(job, nodes, gpus, least)
    if not continues:
        require_room(job, run, tell=tell)
    elif is_active(run):
        raise UserError(f"{run} already runs in the cluster; wait until it ends, or run meshwright cancel {run}")
    asked = Submission(
        address=ray.get_runtime_context().gcs_address,
        run=str(run),
        folder=str(Path.cwd()),
        min_ranks=least,
        gpus=gpus,
        version=VERSION,
        overrides=(*(overrides if continues else ()), *_degrees(loaded)),
        trust=bool(code_of(job)),
    )
    if not continues:
        create_folder(loaded, run)
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        (run / OVER).unlink(missing_ok=True)
        asked.write()
        State().write(run)
        _start(ray, asked)
    except BaseException:
        if not continues:
            shutil.rmtree(run, ignore_errors=True)
        raise
    return asked


def full_layout(source: str, overrides: Sequence[str]) -> list[str]:
    """Overrides for a run that is continued: the layout it was submitted with, of which it may use less by now."""
    before = Submission.read(Path(source)) if Path(source).is_dir() else None
    if before is None:
        return list(overrides)
    return [one for one in before.overrides if one.partition("=")[0] in _DEGREES] + list(overrides)


def _degrees(loaded: LoadedJob) -> list[str]:
    """The layout as asked for: the run folder's job changes with every attempt."""
    layout = loaded.job.layout
    return [f"layout.dp_replicate={layout.dp_replicate}", f"layout.dp_shard={layout.dp_shard}"]


def _start(ray: Any, asked: Submission) -> None:
    """Start the supervisor; it ends itself if this machine's version is not the head's."""
    from ray.exceptions import RayError

    actor = ray.remote(num_cpus=0, resources={HEAD: 0.001}, max_restarts=-1)(Supervisor)
    options = {"name": asked.name, "namespace": NAMESPACE, "lifetime": "detached"}
    supervisor = actor.options(**options).remote(asked)
    try:
        version = ray.get(supervisor.version.remote(), timeout=_START_S)
    except RayError as error:
        ray.kill(supervisor, no_restart=True)
        if "No module named 'meshwright" in str(error):
            raise UserError(
                f"the cluster's head has no meshwright {VERSION}; install it on every machine, or add --ship"
            ) from None
        report = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"the cluster's head could not start the run ({report}); see Ray's logs there") from None
    if version != VERSION:
        ray.kill(supervisor, no_restart=True)
        raise UserError(
            f"the cluster's head has meshwright {version}, this machine {VERSION}; install the same one, or add --ship"
        )
