"""From a job to a supervisor in a Ray cluster: what can be rejected is rejected here, before anything is written."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.errors import UserError
from meshwright.job import LoadedJob, code_of, override_values, require_base, require_data
from meshwright.launch.ray.connection import NAMESPACE, connect
from meshwright.launch.ray.dataset import require_same_rows, with_rows, write_rows
from meshwright.launch.ray.layouts import LAYOUT_FIELDS, gpu_of, layout_fields, require_resources
from meshwright.launch.ray.placement import HEAD, has_gpus, room_of
from meshwright.launch.ray.record import FOLDER, OVER, State, Submission
from meshwright.launch.ray.status import require_idle
from meshwright.launch.ray.supervisor import Supervisor
from meshwright.layout import ranks_of, require_layout
from meshwright.runs.lifecycle import create_folder, require_room, run_path
from meshwright.runs.rehearsed import require_training
from meshwright.version import VERSION

_START_S = 120.0


def submit(
    source: str,
    loaded: LoadedJob,
    address: str | None = None,
    min_ranks: int | None = None,
    ship: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    tell: Callable[[str], None] = print,
    dataset: Any = None,
) -> Submission:
    """Start a supervisor that runs a job on a cluster's machines; a run folder as `source` is continued.

    `min_ranks` lets it run on fewer ranks than the layout has; if the supervisor cannot start, nothing is left. A
    dataset of Ray Data becomes the run's data.
    """
    job = loaded.job
    ranks = ranks_of(job.layout)
    require_layout(job, ranks)
    require_base(job)
    if dataset is None:
        require_data(job.data)
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
    device = gpu_of(job, nodes, gpus)
    require_resources(job, room_of(nodes, gpus), gpus, least, device)
    here = ray.get_runtime_context().gcs_address
    if not continues:
        require_room(job, run, tell=tell)
        if dataset is not None:
            loaded = with_rows(loaded, dataset, run)
    else:
        require_idle(run, here)
        if dataset is not None:
            require_same_rows(dataset, run, job)
    asked = Submission(
        address=here,
        run=str(run),
        folder=str(Path.cwd()),
        min_ranks=least,
        gpus=gpus,
        version=VERSION,
        overrides=(dict(overrides) if continues else {}) | layout_fields(job),
        trust=bool(code_of(job)),
        device=device,
    )
    if not continues:
        create_folder(loaded, run)
    try:
        if dataset is not None and not continues:
            write_rows(dataset, run, job)
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


def full_layout(source: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Overrides for a run that is continued: the layout it was submitted with, instead of that of its last attempt."""
    before = Submission.read(Path(source)) if Path(source).is_dir() else None
    given = {} if before is None else before.overrides
    return {name: value for name, value in given.items() if name in LAYOUT_FIELDS} | override_values(overrides)


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
