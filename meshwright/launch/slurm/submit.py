"""From a job to Slurm jobs: everything that can be rejected is rejected here, before anything is written."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import UserError
from meshwright.hardware import Site, find_site, gpu_by_key
from meshwright.job import LoadedJob, code_of
from meshwright.job.devices import Cluster
from meshwright.launch.slurm.commands import sbatch, scancel
from meshwright.launch.slurm.ladder import Rehearsing, Rung, make_rungs
from meshwright.launch.slurm.record import FOLDER, OVER, Submission
from meshwright.launch.slurm.script import Mode, Request, Shape, batch_script
from meshwright.launch.slurm.status import active_job
from meshwright.layout import ranks_of, require_layout
from meshwright.runs import RunFolder
from meshwright.runs.lifecycle import create_folder, require_room, run_path
from meshwright.runs.rehearsed import require_training


@dataclass(frozen=True)
class Plan:
    """A submission that is not submitted yet."""

    loaded: LoadedJob
    run: Path
    site: Site
    shape: Shape
    request: Request
    chain: int
    rungs: tuple[Rehearsing | Rung, ...]
    continues: bool
    overrides: tuple[str, ...] = ()
    """Overrides for a run that is continued."""

    def scripts(self) -> dict[str, str]:
        """File name in the run's folder → script, in the order they run."""
        scripts = {f"{FOLDER}/{rung.file}": rung.script(self.site, self.request) for rung in self.rungs}
        mode: Mode = "chain" if self.chain > 1 else "requeue"
        restarts = self.loaded.job.run.max_restarts
        scripts[f"{FOLDER}/run.sh"] = batch_script(
            self.run,
            self.run.name,
            self.site,
            self.shape,
            self.request,
            mode,
            restarts,
            overrides=self.overrides,
            trust=bool(code_of(self.loaded.job)),
        )
        return scripts


def shape_of(loaded: LoadedJob, site: Site) -> Shape:
    """The layout's ranks on a site's machines: part of one, or several whole ones."""
    ranks, size = ranks_of(loaded.job.layout), site.gpus_per_node
    if ranks > size and ranks % size:
        raise UserError(
            f"layout needs {ranks} ranks, which do not fill whole nodes of {site.name} ({size} each); make it a "
            f"multiple of {size}"
        )
    nodes = max(1, ranks // size)
    if site.nodes is not None and nodes > site.nodes:
        raise UserError(f"layout needs {nodes} nodes, but {site.title} has {site.nodes}; use a smaller layout")
    require_layout(loaded.job, ranks)
    shape = Shape(nodes, ranks // nodes)
    _require_section(loaded.job.cluster, site, shape)
    return shape


def _require_section(cluster: Cluster, site: Site, shape: Shape) -> None:
    """Reject machines in the job that contradict the layout, or the site: another GPU, or smaller nodes, are not what
    the layout was planned for."""
    said = cluster.model_fields_set
    home = site if cluster.name is None else find_site(cluster.name, "cluster.name")
    size = cluster.gpus_per_node if "gpus_per_node" in said else home.gpus_per_node
    if cluster.name is not None and home == site and size not in (site.gpus_per_node, shape.ranks_per_node):
        raise UserError(
            f"cluster.gpus_per_node = {size}, but {site.name} has {site.gpus_per_node}; set it to that or leave it out"
        )
    needed = -(-shape.ranks // size)
    if "nodes" in said and cluster.nodes != needed:
        raise UserError(
            f"cluster.nodes = {cluster.nodes}, but the layout's {shape.ranks} ranks fill {needed} of {size} GPUs "
            f"each; set cluster.nodes = {needed} or change the layout"
        )
    planned, again = cluster.gpu or home.gpu, f"plan it again with --cluster {shape.nodes}x{site.name}"
    if planned and site.gpu and _key(planned) != _key(site.gpu):
        raise UserError(
            f"cluster.gpu = {planned}, but {site.name} has {site.gpu}; {again}, or set cluster.gpu to run this layout "
            "there"
        )
    if size > site.gpus_per_node and shape.nodes > 1:
        raise UserError(
            f"cluster.gpus_per_node = {size}, but {site.name} has {site.gpus_per_node}, so ranks planned for one node "
            f"would be on several; {again}, or set cluster.gpus_per_node and cluster.nodes to run this layout there"
        )


def _key(gpu: str) -> str:
    """One name for every spelling of a GPU."""
    try:
        return gpu_by_key(gpu).key
    except UserError:  # a profile may name any
        return gpu.lower()


def plan_submission(
    source: str,
    loaded: LoadedJob,
    site: Site,
    request: Request,
    chain: int = 1,
    ladder: bool = False,
    budget: float | None = None,
    tell: Callable[[str], None] = print,
    overrides: Sequence[str] = (),
    dry: bool = False,
) -> Plan:
    """Check what is about to be submitted; a run folder as JOB is continued, `tell` reports trials that cannot run.

    A `dry` one may be planned on any machine: nothing is downloaded, and the disk need not be the cluster's.
    """
    shape = shape_of(loaded, site)
    continues = (Path(source) / "job.resolved.json").is_file()
    run = Path(source) if continues else run_path(loaded)
    require_training(run)
    if not continues and (run / "job.resolved.json").is_file():
        raise UserError(
            f'run.folder = "{run}" holds a run; continue it with meshwright submit {run}, or choose another folder'
        )
    if not continues and dry:
        RunFolder.require_free(run)
    elif not continues:
        require_room(loaded.job, run, tell=tell)  # downloads here: compute nodes often have no network
    elif (job := active_job(run)) is not None:
        raise UserError(f"{run} already has job {job.id} in Slurm; wait until it ends, or run meshwright cancel {run}")
    rungs = make_rungs(loaded, run, site, shape, budget, tell) if ladder else ()
    return Plan(loaded, run, site, shape, request, chain, rungs, continues, tuple(overrides) if continues else ())


def submit(plan: Plan) -> Submission:
    """Create the run's folder with its scripts and submit them to Slurm; if Slurm rejects them, nothing is left."""
    run = plan.run if plan.continues else create_folder(plan.loaded, plan.run).path
    jobs: list[str] = []
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        for left in (OVER, f"{FOLDER}/idle", f"{FOLDER}/crashes"):
            (run / left).unlink(missing_ok=True)
        if plan.rungs:
            shutil.rmtree(run / "ladder", ignore_errors=True)  # from an earlier ladder
        for rung in plan.rungs:
            rung.make()
        for name, script in plan.scripts().items():
            (run / name).touch(mode=0o600)  # it contains a profile's variables
            (run / name).write_text(script, encoding="utf-8")
        for rung in plan.rungs:
            jobs.append(sbatch(run / FOLDER / rung.file, _after(jobs, "afterok")))
        trials = len(jobs)
        for _ in range(max(1, plan.chain)):
            kind = "afterok" if len(jobs) == trials else "afterany"
            jobs.append(sbatch(run / f"{FOLDER}/run.sh", _after(jobs, kind)))
    except BaseException:
        for job in jobs:
            scancel(job)
        if not plan.continues:
            shutil.rmtree(run, ignore_errors=True)
        raise
    ladder, ran = tuple(jobs[:trials]), tuple(jobs[trials:])
    submission = Submission(
        plan.site.name, ran, plan.shape.nodes, plan.shape.ranks_per_node, plan.chain, plan.request.time, ladder
    )
    submission.write(run)
    return submission


def _after(jobs: list[str], kind: str) -> list[str]:
    return [f"--dependency={kind}:{jobs[-1]}", "--kill-on-invalid-dep=yes"] if jobs else []
