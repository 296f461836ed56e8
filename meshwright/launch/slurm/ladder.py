"""Small trials before a large run: 1 GPU, 1 node, 2 nodes; each must pass before the next starts.

A trial is the same job with fewer replicas and as many micro-batches per replica, for a few steps. Run as a module
inside a trial's job, this judges it.
"""

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import Site
from meshwright.job import Job, LoadedJob, code_of, job_text
from meshwright.launch.slurm.record import FOLDER, trial_verdict
from meshwright.launch.slurm.script import Request, Shape, batch_script
from meshwright.runs import RunFolder

TRIAL_STEPS = 20
TRIAL_TIME = "00:15:00"
_TRIAL_HOURS = 0.25
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

    def make(self) -> None:
        """Create the trial's run folder."""
        from meshwright.runs.lifecycle import create_folder

        create_folder(self.loaded, self.run)
        (self.run / FOLDER).mkdir()

    def script(self, site: Site, request: Request) -> str:
        """Its batch script."""
        asked = Request(
            TRIAL_TIME,
            request.account,
            request.partition,
            request.qos,
            _SIGNAL_S,
            request.per_rank,
            request.container,
            request.options,
        )
        trust = bool(code_of(self.loaded.job))
        name = f"{self.run.parents[1].name}-trial-{self.shape.ranks}"
        return batch_script(self.run, name, site, self.shape, asked, "once", judge=self.judge, trust=trust)


def make_rungs(
    loaded: LoadedJob, run: Path, site: Site, shape: Shape, budget: float | None, tell: Callable[[str], None]
) -> tuple[Rung, ...]:
    """The trials of a job on a site, smallest first; sizes its layout cannot shrink to are skipped, with the reason."""
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
        words = [
            sys.executable if site.python is None else site.python,
            "-m",
            __name__,
            str((run / f"ladder/{size}").absolute()),
        ]
        words += ["--ranks", str(size), "--all", str(shape.ranks), "--steps", str(loaded.job.run.steps)]
        words += ["--before", str(rungs[-1].run.absolute())] if rungs else []
        words += ["--budget", str(budget)] if budget is not None else []
        rungs.append(Rung(small, run / f"ladder/{size}", Shape(nodes, size // nodes), shlex.join(words)))
    spent = sum(rung.shape.ranks * _TRIAL_HOURS for rung in rungs)
    if budget is not None and spent >= budget:
        raise UserError(
            f"--budget = {budget:g} GPU-hours: the trials alone may take {spent:g}; give more or leave out --ladder"
        )
    return tuple(rungs)


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
    from meshwright.plan import machine_of, predict

    nodes = max(1, ranks // site.gpus_per_node)
    cluster = Cluster(nodes=nodes, gpus_per_node=ranks // nodes, gpu=site.gpu)
    try:
        machine_of(cluster)
    except UserError:
        return  # the planner does not know this GPU
    if job.model.extra_tokens:
        return  # nor such models
    if not predict(job, cluster).fits:
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
