"""`meshwright.plan`: the fastest layouts of a job on a cluster, each as a job to continue with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.jobs import JobLike, is_preset, load_job

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.job.devices import Cluster
    from meshwright.plan import ErrorBars, Prediction, Search

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

    @property
    def bars(self) -> ErrorBars:
        """80% intervals of time and memory, and the measured runs that they rest on."""
        from meshwright.plan import error_bars

        return error_bars(self.job, self.job.cluster, self.prediction)

    def row(self) -> dict[str, Any]:
        """The numbers of a plan's table."""
        from meshwright.plan import limit

        bars = self.bars
        return {
            "layout": self.words,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.prediction.tokens_per_s_per_gpu,
            "tokens_per_s_per_gpu_low": bars.tokens_per_s_per_gpu[0],
            "tokens_per_s_per_gpu_high": bars.tokens_per_s_per_gpu[1],
            "mfu": self.mfu,
            "memory_gib": self.memory_gib,
            "memory_gib_low": bars.device_bytes[0] / GIB,
            "memory_gib_high": bars.device_bytes[1] / GIB,
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
    def evidence(self) -> str:
        """The measured runs nearest to the fastest layout, and how far their predicted times were off."""
        return self.best.bars.evidence

    @property
    def profile(self) -> str:
        """Which profile of the GPU was used, from where and when, or what its rates are derived from."""
        return self.best.prediction.profile

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: a dictionary for every layout."""
        return [layout.row() for layout in self.layouts]

    def __iter__(self) -> Iterator[PlannedLayout]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    def __str__(self) -> str:
        lines = ["   step s     80% interval     GiB    MFU  layout"]
        for one in self.layouts:
            mfu = "–" if one.mfu is None else f"{one.mfu:.1%}"
            between = "–".join(f"{end:.3g}" for end in one.bars.step_s)
            lines.append(f"{one.step_s:9.4g} {between:>16} {one.memory_gib:7.1f} {mfu:>6}  {one.words}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Question:
    """What a search is about."""

    job: Job
    """With the batch and the sequence length of the search; its layout and memory are for the search to choose."""
    machines: Cluster
    practice: str
    """Where the batch is from, if nobody said."""
    notes: tuple[str, ...]
    """How what was asked was understood, where it had to be."""


@dataclass(frozen=True)
class Found:
    """A question and what was found."""

    question: Question
    search: Search


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

    A job file is planned as it is. In a job from elsewhere, as from a preset, what is not set is taken as usual: batch
    and sequence length for models of this size, bf16, compiled blocks. Needs no torch.
    """
    from meshwright.plan import predict, why_not

    own = load_job(job, trust=True)  # nothing of it is run
    exact = isinstance(job, str | Path) and not is_preset(str(job))
    asked = question(own, cluster, exact=exact, sequence_length=sequence_length, batch_tokens=batch_tokens)
    found = find_layouts(asked, top, allow)
    jobs = [_validated(candidate.job, asked.machines) for candidate in found.search.best]
    layouts = [PlannedLayout(one, predict(one, asked.machines)) for one in jobs]
    fitting = sorted((one for one in layouts if one.prediction.fits), key=lambda one: one.step_s)
    if not fitting:
        raise _refusal(found, "the job")
    misses = tuple(why_not(miss, found.search) for miss in found.search.misses)
    return Plan(tuple(fitting), misses, asked.machines)


def question(
    job: Job,
    cluster: str | Cluster | None,
    *,
    exact: bool,
    sequence_length: int | None = None,
    batch_tokens: int | None = None,
    mtbf_hours: float | None = None,
    longest: bool = False,
) -> Question:
    """A job on machines, with the batch and the sequence length to plan for.

    If `exact`, what the job leaves out has its default, as in a training; else it is as usual for models of this size.
    `longest` takes the model's longest sequences where nobody gives a length.
    """
    from meshwright.plan import target_of

    machines, note = target_of(job, cluster)
    if mtbf_hours is not None:
        machines = machines.model_copy(update={"mtbf_hours": mtbf_hours})
    most, said = job.model.max_sequence_length, job.batch.model_fields_set
    sequence = sequence_length
    if sequence is None:
        own = exact or "sequence_length" in said
        sequence = job.batch.sequence_length if own else most if longest else min(4096, most)
    if not exact:
        job = _as_usual(job, machines)
    gpus = machines.nodes * machines.gpus_per_node
    batch, practice, rounded = _batch(job, sequence, gpus, batch_tokens, own=exact or "global_batch" in said)
    sizes = {"sequence_length": sequence, "global_batch": batch, "micro_batch": 1}
    sized = job.model_copy(update={"batch": job.batch.model_copy(update=sizes)})
    return Question(sized, machines, practice, tuple(words for words in (note, rounded) if words))


def _as_usual(job: Job, machines: Cluster) -> Job:
    """A job in bf16, or fp16 on older GPUs, and compiled, where it does not say otherwise."""
    from meshwright.plan import usual_compute

    update: dict[str, Any] = {}
    if "compute" not in job.precision.model_fields_set:
        update["precision"] = job.precision.model_copy(update={"compute": usual_compute(machines)})
    if "compile" not in job.run.model_fields_set:
        update["run"] = job.run.model_copy(update={"compile": True})
    return job.model_copy(update=update)


def _batch(job: Job, sequence: int, gpus: int, batch_tokens: int | None, *, own: bool) -> tuple[int, str, str]:
    """Sequences a step; where they are from if nobody said; and how a request was rounded if it was."""
    from meshwright.cost import parameter_count
    from meshwright.errors import UserError
    from meshwright.plan import batch_sequences, fine_tuning_batch

    if batch_tokens is None and own:
        return job.batch.global_batch, "", ""
    practice = ""
    wanted = batch_tokens
    if batch_tokens is None and job.model.init_from is not None:
        sequences, practice = fine_tuning_batch()
        wanted = sequences * sequence
    if wanted is not None and wanted < sequence:
        raise UserError(
            f"--batch-tokens = {wanted} is less than one sequence of {sequence} tokens; give a multiple of {sequence}, "
            "or a shorter --seq"
        )
    batch, usual = batch_sequences(parameter_count(job.model), sequence, gpus, wanted)
    rounded = ""
    if batch_tokens is not None and batch * sequence != batch_tokens:
        shared = f"{batch} sequences, which {gpus} GPUs can share"
        rounded = f"--batch-tokens = {batch_tokens} is taken as {batch * sequence}: {shared}"
    return batch, usual or practice, rounded


def find_layouts(asked: Question, top: int, allow: Collection[str], called: str = "the model") -> Found:
    """Search the layouts of a question; refused where none fits."""
    from meshwright.plan import search

    found = Found(asked, search(asked.job, asked.machines, top=top, allow=allow))
    if not found.search.best:
        raise _refusal(found, called)
    return found


def _refusal(found: Found, called: str) -> Exception:
    from meshwright.errors import UserError
    from meshwright.plan import spelled, what_would_fit, why_not

    misses, asked = found.search.misses, found.question
    reason = f" ({why_not(misses[0], found.search)})" if misses else ""
    remedy = what_would_fit(asked.job, asked.machines) or "more or larger GPUs"
    return UserError(f"no layout of {called} fits on --cluster = {spelled(asked.machines)}{reason}; give {remedy}")


def _validated(job: Job, machines: Cluster) -> Job:
    """A layout of a search as a job that was checked as any other."""
    from meshwright.job import job_of_table

    table = job.model_dump(mode="json", exclude_unset=True)
    return job_of_table(table | {"cluster": machines.model_dump(mode="json", exclude_unset=True)}, "job")
