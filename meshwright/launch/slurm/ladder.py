"""Small jobs before a large run: a rehearsal, then trials on 1 GPU, 1 node, 2 nodes; each must pass before the next.

The rehearsal runs one rank of every kind of the whole layout on one GPU. A trial is the same job with fewer replicas
and as many micro-batches per replica, for a few steps. Run as a module inside a trial's job, this judges it.
"""

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import Site
from meshwright.job import Job, LoadedJob, code_of, job_text
from meshwright.launch.slurm.record import FOLDER, REHEARSE, REHEARSED, trial_verdict
from meshwright.launch.slurm.script import Request, Shape, batch_script
from meshwright.python_process import python_command
from meshwright.runs import RunFolder

TRIAL_STEPS = 20
TRIAL_TIME = "00:15:00"
_TRIAL_HOURS = 0.25
REHEARSAL_TIME = "00:30:00"
_REHEARSAL_HOURS = 0.5
_SLOWEST = 0.5
"""Fraction of the previous trial's speed per GPU that must be reached."""
_SIGNAL_S = 60


@dataclass(frozen=True)
class Rung:
    """One trial."""

    loaded: LoadedJob
    run: Path
    shape: Shape
    judge: str

    @property
    def file(self) -> str:
        """The name of its script."""
        return f"trial-{self.shape.ranks}.sh"

    def make(self) -> None:
        """Create the trial's run folder."""
        from meshwright.runs.lifecycle import create_folder

        create_folder(self.loaded, self.run)
        (self.run / FOLDER).mkdir()

    def script(self, site: Site, request: Request) -> str:
        """Its batch script."""
        asked = replace(request, time=TRIAL_TIME, signal_s=_SIGNAL_S)
        trust = bool(code_of(self.loaded.job))
        name = f"{self.run.parents[1].name}-trial-{self.shape.ranks}"
        return batch_script(self.run, name, site, self.shape, asked, "once", judge=self.judge, trust=trust)


@dataclass(frozen=True)
class Rehearsing:
    """The first rung: one rank of every kind of the whole run, on one GPU."""

    loaded: LoadedJob
    whole: Path
    """The run that it is for."""
    cluster: str | None
    """The machines of the run as `--cluster` names them; None if the job names them, or the planner knows none."""
    shape = Shape(1, 1)
    file = "rehearse.sh"

    @property
    def run(self) -> Path:
        """Where its job's files are."""
        return self.whole / REHEARSE

    def make(self) -> None:
        """Create its folder, with the job as it is to run: a run that is continued may change it."""
        (self.run / FOLDER).mkdir(parents=True)
        text = job_text(self.loaded.job, f"the job of {self.whole.name}, to be rehearsed")
        (self.run / "job.toml").write_text(text, encoding="utf-8")

    def script(self, site: Site, request: Request) -> str:
        """Its batch script; a rank that runs out of memory is a result, which the judge reads."""
        asked = replace(request, time=REHEARSAL_TIME, signal_s=_SIGNAL_S)
        cluster = "" if self.cluster is None else f" --cluster {shlex.quote(self.cluster)}"
        out = Path(REHEARSED).relative_to(REHEARSE)
        command = f'rehearse "$run/job.toml" --each-stage --out "$run/{out}"{cluster}'
        run = str(self.run.absolute())
        judge = shlex.join(python_command("-m", "meshwright.rehearse.verdict", run, python=site.python))
        trust, name = bool(code_of(self.loaded.job)), f"{self.whole.name}-rehearse"
        return batch_script(
            self.run, name, site, self.shape, asked, "once", judge=judge, trust=trust, command=command, judged=1
        )


def make_rungs(
    loaded: LoadedJob, run: Path, site: Site, shape: Shape, budget: float | None, tell: Callable[[str], None]
) -> tuple[Rehearsing | Rung, ...]:
    """The rehearsal and the trials of a job on a site, smallest first; sizes its layout cannot shrink to are skipped,
    with the reason. A run on one GPU has none."""
    if shape.ranks == 1:
        return ()
    sizes = sorted({size for size in (1, site.gpus_per_node, 2 * site.gpus_per_node) if size < shape.ranks})
    rungs: list[Rung] = []
    for size in sizes:
        try:
            small = shrunk(loaded, size, run / f"ladder/{size}")
            _require_fit(small.job, site, size)
        except UserError as error:
            tell(f"no trial on {size}: {error}")
            continue
        nodes = max(1, size // site.gpus_per_node)
        words = python_command("-m", __name__, str((run / f"ladder/{size}").absolute()), python=site.python)
        words += ["--ranks", str(size), "--all", str(shape.ranks), "--steps", str(loaded.job.run.steps)]
        words += ["--before", str(rungs[-1].run.absolute())] if rungs else []
        words += ["--budget", str(budget)] if budget is not None else []
        rungs.append(Rung(small, run / f"ladder/{size}", Shape(nodes, size // nodes), shlex.join(words)))
    spent = _REHEARSAL_HOURS + sum(rung.shape.ranks * _TRIAL_HOURS for rung in rungs)
    if budget is not None and spent >= budget:
        raise UserError(
            f"--budget = {budget:g} GPU-hours: rehearsal and trials alone may take {spent:g}; give more or leave out "
            "--ladder"
        )
    return Rehearsing(loaded, run, _cluster(loaded.job, site, shape)), *rungs


def _cluster(job: Job, site: Site, shape: Shape) -> str | None:
    """The run's machines for a job that does not name them, if the planner knows them."""
    from meshwright.plan import machine_of, parse_cluster

    if job.cluster.name or job.cluster.gpu:
        return None
    whole = shape.ranks_per_node == site.gpus_per_node
    parts = (shape.nodes, site.name) if whole else (shape.nodes, shape.ranks_per_node, site.gpu)
    spelling = "x".join(map(str, parts))
    try:
        machine_of(parse_cluster(spelling))
    except UserError:
        return None
    return spelling


def shrunk(loaded: LoadedJob, ranks: int, run: Path) -> LoadedJob:
    """The job on fewer ranks: fewer replicas, and a proportionally smaller batch; other axes stay the same."""
    from meshwright.layout import ranks_of, require_layout

    job = loaded.job
    replicas = job.layout.dp_replicate * job.layout.dp_shard
    others = ranks_of(job.layout) // replicas
    if ranks % others:
        raise UserError(f"the layout's other axes need {others} ranks, and {ranks} is not a multiple of that")
    fewer = ranks // others
    shard = math.gcd(fewer, job.layout.dp_shard)
    layout = {"dp_shard": shard, "dp_replicate": fewer // shard}
    if shard * job.layout.cp == 1:
        layout["zero"] = 0  # nothing is left to shard over
    batch = {"global_batch": job.accumulation * job.batch.micro_batch * fewer}
    steps = min(TRIAL_STEPS, job.run.steps)
    warmup = min(job.warmup_steps, steps // 2)
    changes: dict[str, dict[str, Any]] = {
        "layout": layout,
        "batch": batch,
        "run": {"steps": steps, "folder": str(run)},
        "schedule": {"warmup_steps": warmup, "decay_steps": min(job.decay_steps, steps - warmup)},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": None, "every_minutes": None, "auto": False, "backup_to": None},
    }
    table = job.model_dump(mode="json")
    for section, fields in changes.items():
        table[section] = {**table[section], **fields}
    small = Job.model_validate_json(json.dumps(table), strict=True)
    require_layout(small, ranks)
    origins = {f"{section}.{field}": "trial" for section, fields in changes.items() for field in fields}
    text = job_text(small, f"a trial of {loaded.name} on {ranks} ranks")
    return LoadedJob(small, loaded.name, text, {**loaded.origins, **origins})


def _require_fit(job: Job, site: Site, ranks: int) -> None:
    """Reject a trial that would only show that fewer ranks have less memory."""
    from meshwright.job.devices import Cluster
    from meshwright.layout import resolve_for
    from meshwright.plan import machine_of, predict

    nodes = max(1, ranks // site.gpus_per_node)
    cluster = Cluster(nodes=nodes, gpus_per_node=ranks // nodes, gpu=site.gpu)
    try:
        machine_of(cluster)
    except UserError:
        return  # the planner does not know this GPU
    if not predict(resolve_for(job, cluster), cluster).fits:
        raise UserError(f"the planner predicts that it does not fit on {ranks} × {site.gpu}")


def verdict(
    run: Path, ranks: int, all_ranks: int, steps: int, before: Path | None, budget: float | None
) -> dict[str, Any]:
    """Go or no-go after a trial, with the numbers: finished, finite, not much slower per GPU than the previous trial,
    and what the whole run would cost at this speed."""
    folder = RunFolder.open(run)
    rows = [row for row in folder.numbers().rows if row.get("loss") is not None and row.get("step_s")]
    if folder.state() != "done" or not rows:
        return {"go": False, "why": f"the trial is {folder.state()}, not done"}
    if not all(math.isfinite(row["loss"]) for row in rows):
        return {"go": False, "why": "a loss is not finite"}
    times = sorted(row["step_s"] for row in rows[len(rows) // 2 :])
    step_s = times[len(times) // 2]
    tokens = rows[-1]["tokens"] / rows[-1]["step"] / step_s / ranks
    # As many micro-batches per replica: a step of the whole run takes at least as long.
    hours = steps * step_s * all_ranks / 3600
    report = {"ranks": ranks, "step_s": step_s, "tokens_per_s_per_gpu": tokens, "gpu_hours_of_the_run": hours}
    if before is not None:
        earlier = (trial_verdict(before) or {}).get("tokens_per_s_per_gpu", 0.0)
        if tokens < _SLOWEST * earlier:
            return {"go": False, "why": f"{tokens:,.0f} tokens/s per GPU, down from {earlier:,.0f}", **report}
    if budget is not None and hours > budget:
        return {"go": False, "why": f"the run would take {hours:,.1f} GPU-hours, more than {budget:g}", **report}
    return {"go": True, "why": f"{tokens:,.0f} tokens/s per GPU; the run would take {hours:,.1f} GPU-hours", **report}


def _main(words: list[str]) -> int:
    from argparse import ArgumentParser

    parser = ArgumentParser(description="Judge a trial.")
    parser.add_argument("run", type=Path)
    for name, kind in (("--ranks", int), ("--all", int), ("--steps", int), ("--before", Path), ("--budget", float)):
        parser.add_argument(name, type=kind)
    given = parser.parse_args(words)
    report = verdict(given.run, given.ranks, given.all, given.steps, given.before, given.budget)
    (given.run / FOLDER / "verdict.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{'go' if report['go'] else 'no-go'}: {report['why']}")
    return 0 if report["go"] else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
