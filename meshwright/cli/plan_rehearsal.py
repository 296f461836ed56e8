"""What `meshwright plan --check` shows of a job that was rehearsed: planned and measured next to each other."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.plan_bars import interval

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.job.devices import Cluster
    from meshwright.plan import ErrorBars, Prediction
    from meshwright.rehearse import Evidence, Rehearsal

GIB = 2**30


@dataclass(frozen=True)
class FoundRehearsal:
    """The rehearsal that a plan is shown with, or none; if there is one of another job, why it is not used."""

    folder: Path | None = None
    rehearsal: "Rehearsal | None" = None
    not_used: str = ""

    def cluster_of(self, job: "Job") -> str | None:
        """The rehearsal's cluster for a job that names none."""
        named = job.cluster.name or job.cluster.gpu
        return None if named or self.rehearsal is None else self.rehearsal.cluster or None

    def evidence(
        self, job: "Job", cluster: "Cluster", prediction: "Prediction", bars: "ErrorBars"
    ) -> "Evidence | None":
        """What it says of the job on these machines."""
        from meshwright.rehearse import evidence

        return None if self.rehearsal is None else evidence(job, cluster, prediction, bars, self.rehearsal)


def find_rehearsal(job: "Job", source: str, given: Path | None, cluster: str | None) -> FoundRehearsal:
    """The given rehearsal, which must be of this very job; else the one in the folder that the job is read from, if it
    still is of this job."""
    from meshwright.errors import UserError
    from meshwright.job import load_job
    from meshwright.launch.slurm import REHEARSED
    from meshwright.reading import REHEARSAL

    folder = given
    if given is None:
        places = [Path(source), Path(source) / REHEARSED]
        folder = next((place for place in places if (place / REHEARSAL).is_file()), None)
    if folder is None:
        return FoundRehearsal()
    from meshwright.layout import resolve_for
    from meshwright.plan import check_target
    from meshwright.rehearse import mismatches
    from meshwright.rehearse.folder import read_rehearsal

    rehearsal = read_rehearsal(folder)
    found = FoundRehearsal(folder, rehearsal)
    planned = resolve_for(job, check_target(job, cluster or found.cluster_of(job))[0])
    differing = mismatches(planned, load_job(str(folder), trust=True).job, rehearsal)  # none of its code is run
    if differing and given is not None:
        raise UserError(
            f"--rehearsal = {given} is not of this job: {', '.join(differing)}; rehearse the job as it is now, or "
            "leave it out"
        )
    if differing:
        return FoundRehearsal(not_used=f"the rehearsal in {folder} is not used: {', '.join(differing)}")
    return found


def rehearsal_json(found: FoundRehearsal, known: "Evidence") -> dict[str, Any]:
    """What `--json` has in addition."""
    step = known.step
    return {
        "rehearsal": {
            "folder": str(found.folder),
            "device": known.rehearsal.device,
            "torch": known.rehearsal.torch,
            "step": None if step is None else asdict(step),
            "ranks": [
                {
                    "rank": rank.rank,
                    "pipeline_rank": rank.pipeline_rank,
                    "state": rank.state,
                    "step_s": rank.step_s,
                    "needed_bytes": rank.needed_bytes,
                    "memory": None if rank.memory is None else asdict(rank.memory),
                    "device_bytes": known.known_bytes.get(rank.pipeline_rank),
                }
                for rank in known.rehearsal.ranks
            ],
            "fits": known.fits,
            "interval": {"step_s": list(known.step_s), "device_bytes": list(known.device_bytes)},
            "warnings": list(known.warnings),
        }
    }


def rehearsal_tables(known: "Evidence | None") -> list[Any]:
    """Time and memory, planned and rehearsed."""
    if known is None:
        return []
    times = [] if known.step is None else [_time_table(known)]
    return times + ([_memory_table(known)] if any(rank.memory for rank in known.rehearsal.ranks) else [])


def _time_table(known: "Evidence") -> Any:
    from rich.table import Table

    step, planned = known.step, _planned_parts(known.prediction)
    assert step is not None
    own = dict(step.phases_s)
    own["forward"] += own.pop("loss", 0.0)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms of a step")
    for name in ("planned", "rehearsed", ""):
        table.add_column(name, justify="right" if name else "left")
    for name in dict.fromkeys((*own, *planned)):
        pair = (planned.get(name, 0.0), own.get(name, 0.0))
        if any(pair):
            how = "modelled" if name in step.modelled or name not in own else "measured"
            table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in pair), how)
    table.add_row("step", f"{1e3 * known.prediction.step_s:.2f}", f"{1e3 * step.step_s:.2f}", style="bold")
    return table


def _planned_parts(prediction: "Prediction") -> dict[str, float]:
    """The plan's phases as a rehearsal measures them."""
    parts = dict.fromkeys(("forward", "backward", "optimizer", "data and other"), 0.0)
    again = {"recomputation": "backward", "update on the host": "optimizer", "host": "data and other"}
    for name, seconds in prediction.phases.items():
        first = name.partition(" ")[0]
        part = again.get(name) or (first if first in ("forward", "backward") else name)
        parts[part] = parts.get(part, 0.0) + seconds
    return parts


def _memory_table(known: "Evidence") -> Any:
    from rich.table import Table

    from meshwright.rehearse.words import plan_error, planned_kinds

    ranks = [(rank, rank.memory) for rank in known.rehearsal.ranks if rank.memory is not None]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB planned, rehearsed")
    for rank, _ in ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    planned = [planned_kinds(use.planned_terms) for _, use in ranks]
    kinds = [name for _, use in ranks for name in use.by_kind] + [name for plan in planned for name in plan]
    for kind in dict.fromkeys(kinds):
        pairs = [(plan.get(kind, 0.0), use.by_kind.get(kind, 0)) for (_, use), plan in zip(ranks, planned, strict=True)]
        if any(map(any, pairs)):
            table.add_row(kind, *(f"{its / GIB:.2f}, {own / GIB:.2f}" for its, own in pairs))
    for name, both in (
        ("allocated", [(use.planned_bytes, use.allocated_bytes) for _, use in ranks]),
        ("reserved", [(use.planned_reserved_bytes, use.reserved_bytes) for _, use in ranks]),
    ):
        cells = [
            "" if its is None or own is None else f"{its / GIB:.2f}, {own / GIB:.2f} ({plan_error(own, its)})"
            for its, own in both
        ]
        if any(cells):
            table.add_row(name, *cells, style="bold")
    return table


def rehearsal_lines(found: FoundRehearsal, known: "Evidence | None") -> list[str]:
    """What the rehearsal says, in sentences: where it is from, the step, whether it fits, and the narrower interval."""
    if known is None:
        return [found.not_used] if found.not_used else []
    from meshwright.rehearse.words import shortage

    rehearsal, prediction, step = known.rehearsal, known.prediction, known.step
    ranks = sorted({rank.pipeline_rank for rank in rehearsal.ranks})
    some = f"pipeline rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(prediction.memory)}"
    lines = [f"rehearsal: {found.folder}, {some} on {rehearsal.device}, torch {rehearsal.torch}"]
    lines += [f"out of memory: {shortage(rank, rehearsal)}" for rank in rehearsal.ranks if rank.state != "measured"]
    if step is not None:
        share = f"{step.measured_s / step.step_s:.0%} of it measured, the rest modelled"
        lines.append(f"rehearsed: {step.step_s:.3g} s per step, {share}; planned {prediction.step_s:.3g} s")
    step_s = interval(known.step_s, ".3g")
    held = interval((size / GIB for size in known.device_bytes), ".1f")
    fits = {True: "it fits", False: "it does not fit", None: "it may not fit"}[known.fits]
    lines.append(f"80% interval with the rehearsal: {step_s} s per step, {held} GiB; {fits}")
    lines.append(f"what it rests on: {_rests_on(known, len(ranks))}")
    return lines + [f"warning: {warning}" for warning in known.warnings]


def _rests_on(known: "Evidence", ranks: int) -> str:
    """Which parts are measured, and what is assumed of the others."""
    every = len(known.known_bytes) == len(known.prediction.memory)
    some = "" if every else f" of {ranks} of {len(known.prediction.memory)} pipeline ranks"
    memory = f"memory{some} is measured, driver and communicators as planned"
    if known.step is None:
        return f"{memory}; time is the plan's"
    if known.same_gpu:
        return f"{memory}; compute is measured, and what is modelled is taken to be as far off as whole plans are"
    return f"{memory}; compute was measured on another GPU, so time is taken to be as far off as whole plans are"
