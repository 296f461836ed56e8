"""`meshwright.plan`: the fastest layouts of a job on a cluster, each as a job to continue with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.api.jobs import JobLike, load_job

if TYPE_CHECKING:
    from meshwright.job import Job, Model
    from meshwright.job.devices import Cluster
    from meshwright.plan import Prediction, Search

GIB = 2**30


@dataclass(frozen=True)
class PlannedLayout:
    """One layout: the job in it, and what it is predicted to take."""

    job: Job
    """The job that was planned, in this layout on these machines."""
    prediction: Prediction

    @property
    def words(self) -> str:
        """The layout in a line."""
        from meshwright.plan import layout_words

        return layout_words(self.job)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s

    @property
    def memory_gib(self) -> float:
        """GiB of the fullest device."""
        return self.prediction.fullest.device / GIB

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the device's peak; None where that is not known."""
        return self.prediction.mfu

    def row(self) -> dict[str, Any]:
        """The numbers of a plan's table."""
        from meshwright.plan import limit

        return {
            "layout": self.words,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.prediction.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "memory_gib": self.memory_gib,
            "fits": self.prediction.fits,
            "limited_by": limit(self.prediction),
        }


@dataclass(frozen=True)
class Plan:
    """Layouts of a job, fastest first."""

    layouts: tuple[PlannedLayout, ...]
    misses: tuple[str, ...]
    """Why the nearest faster layouts do not fit, a sentence each."""
    cluster: Cluster

    @property
    def best(self) -> PlannedLayout:
        """The fastest."""
        return self.layouts[0]

    @property
    def guessed(self) -> tuple[str, ...]:
        """What of the machines is guessed and not measured, a sentence each."""
        return self.best.prediction.guessed

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: a dictionary for every layout."""
        return [layout.row() for layout in self.layouts]

    def __iter__(self) -> Iterator[PlannedLayout]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    def __str__(self) -> str:
        lines = ["   step s     GiB    MFU  layout"]
        for one in self.layouts:
            mfu = "–" if one.mfu is None else f"{one.mfu:.1%}"
            lines.append(f"{one.step_s:9.4g} {one.memory_gib:7.1f} {mfu:>6}  {one.words}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Found:
    """What a search looked for, and found."""

    search: Search
    machines: Cluster
    sequence: int
    batch: int
    practice: str
    """Where the batch is from, if nobody said."""


def plan(
    job: JobLike,
    cluster: str | Cluster | None = None,
    *,
    batch_tokens: int | None = None,
    sequence_length: int | None = None,
    top: int = 10,
    allow: Collection[str] = (),
) -> Plan:
    """The fastest layouts of a job that fit a cluster (`8xh100`, `16x8xa100-80gb`, `16xleonardo`; else the job's own).

    Batch, sequence length and precision.compute are the job's where it sets them; else models of this size are taken as
    they are usually trained, in bf16. Needs no torch.
    """
    from meshwright.plan import why_not

    own = load_job(job, trust=True)  # nothing of it is run
    if sequence_length is None and "sequence_length" in own.batch.model_fields_set:
        sequence_length = own.batch.sequence_length
    if batch_tokens is None and "global_batch" in own.batch.model_fields_set:
        batch_tokens = own.batch.global_batch * (sequence_length or own.batch.sequence_length)
    compute = own.precision.compute if "compute" in own.precision.model_fields_set else "bf16"
    found = find_layouts(own.model, own, cluster, sequence_length, batch_tokens, top, allow, compute)
    layouts = [_applied(own, candidate.job, found.machines) for candidate in found.search.best]
    fitting = sorted((one for one in layouts if one.prediction.fits), key=lambda one: one.step_s)
    if not fitting:
        raise _refusal(own.model, found, "the job")
    misses = tuple(why_not(miss, found.search) for miss in found.search.misses)
    return Plan(tuple(fitting), misses, found.machines)


def find_layouts(
    model: Model,
    job: Job | None,
    cluster: str | Cluster | None,
    sequence_length: int | None,
    batch_tokens: int | None,
    top: int,
    allow: Collection[str],
    compute: str = "bf16",
    mtbf_hours: float | None = None,
    called: str = "the model",
) -> Found:
    """Search the layouts of a model, with what a job and a caller say of it; refused where none fits."""
    from meshwright.cost import parameter_count
    from meshwright.plan import batch_sequences, search

    machines = _machines(cluster, job)
    sequence = sequence_length or min(4096, model.max_sequence_length)
    if mtbf_hours is not None:
        machines = machines.model_copy(update={"mtbf_hours": mtbf_hours})
    gpus = machines.nodes * machines.gpus_per_node
    batch, practice = batch_sequences(parameter_count(model), sequence, gpus, batch_tokens)
    found = Found(
        search(model, machines, sequence, batch, compute, top=top, allow=allow), machines, sequence, batch, practice
    )
    if not found.search.best:
        raise _refusal(model, found, called)
    return found


def _refusal(model: Model, found: Found, called: str) -> Exception:
    from meshwright.errors import UserError
    from meshwright.plan import spelled, what_would_fit, why_not

    misses = found.search.misses
    reason = f" ({why_not(misses[0], found.search)})" if misses else ""
    remedy = what_would_fit(model, found.machines, found.sequence, found.batch) or "more or larger GPUs"
    return UserError(f"no layout of {called} fits on --cluster = {spelled(found.machines)}{reason}; give {remedy}")


def _machines(cluster: str | Cluster | None, job: Job | None) -> Cluster:
    """Those a caller names, else those a job's own section says."""
    from meshwright.errors import UserError
    from meshwright.hardware import completed
    from meshwright.plan import parse_cluster

    if isinstance(cluster, str):
        return parse_cluster(cluster)
    if cluster is not None:
        return completed(cluster)
    if job is None or (job.cluster.name or job.cluster.gpu) is None:
        raise UserError(
            "--cluster is missing, and a search needs it; write --cluster 8xh100 or 16x8xa100-80gb, or search for a "
            "job with a [cluster]"
        )
    return completed(job.cluster)


def _applied(job: Job, planned: Job, machines: Cluster) -> PlannedLayout:
    """The job in a layout that a search found, predicted with all that the job says beside it, as its optimizer."""
    from meshwright.job import job_of_table
    from meshwright.plan import predict

    own = job.model_dump(mode="json", exclude_unset=True)
    found = planned.model_dump(mode="json", exclude_unset=True)
    table = own | {"layout": found["layout"], "memory": found["memory"]}
    table["cluster"] = machines.model_dump(mode="json", exclude_unset=True)
    for section in ("batch", "precision", "run"):
        table[section] = own.get(section, {}) | found[section]
    applied = job_of_table(table, "job")
    return PlannedLayout(applied, predict(applied, machines))
