"""What a search is about: a job on machines with its batch and sequence length, and the answer or why there is none."""

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster, Layout
from meshwright.layout import AUTO, resolve_for, with_values
from meshwright.plan.explain import batch_sequences, why_not
from meshwright.plan.machine import spelled, usual_compute
from meshwright.plan.remedies import remedies
from meshwright.plan.search import Search, search
from meshwright.plan.target import target_of


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
    machines, note = target_of(job, cluster)
    if mtbf_hours is not None:
        machines = machines.model_copy(update={"mtbf_hours": mtbf_hours})
    most, said = job.model.max_sequence_length, job.batch.model_fields_set
    sequence = sequence_length
    if sequence is None:
        own = exact or "sequence_length" in said
        sequence = job.batch.sequence_length if own else most if longest else min(4096, most)
    job = _resolved(job, machines, exact=exact)
    gpus = machines.nodes * machines.gpus_per_node
    batch, practice, rounded = _batch(job, sequence, gpus, batch_tokens, own=exact or "global_batch" in said)
    sizes = {"sequence_length": sequence, "global_batch": batch, "micro_batch": 1}
    sized = job.model_copy(update={"batch": job.batch.model_copy(update=sizes)})
    return Question(sized, machines, practice, tuple(words for words in (note, rounded) if words))


def _resolved(job: Job, machines: Cluster, *, exact: bool) -> Job:
    """The job as these machines train it in a plain layout: the search leaves out layouts that cannot be compiled."""
    if not exact and job.precision.compute == AUTO:
        job = with_values(job, {"precision.compute": usual_compute(machines)})
    plain = resolve_for(job.model_copy(update={"layout": Layout()}), machines)
    return plain.model_copy(update={"layout": job.layout})


def _batch(job: Job, sequence: int, gpus: int, batch_tokens: int | None, *, own: bool) -> tuple[int, str, str]:
    """Sequences a step; where they are from if nobody said; and how a request was rounded if it was."""
    if batch_tokens is None and own:
        return job.batch.global_batch, "", ""
    if batch_tokens is not None and batch_tokens < sequence:
        raise UserError(
            f"--batch-tokens = {batch_tokens} is less than one sequence of {sequence} tokens; give a multiple of "
            f"{sequence}, or a shorter --seq"
        )
    batch, practice = batch_sequences(job.model, sequence, gpus, batch_tokens)
    rounded = ""
    if batch_tokens is not None and batch * sequence != batch_tokens:
        shared = f"{batch} sequences, which {gpus} GPUs can share"
        rounded = f"--batch-tokens = {batch_tokens} is taken as {batch * sequence}: {shared}"
    return batch, practice, rounded


def find_layouts(asked: Question, top: int, allow: Collection[str], called: str = "the model") -> Found:
    """Search the layouts of a question; refused where none fits."""
    found = Found(asked, search(asked.job, asked.machines, top=top, allow=allow))
    if not found.search.best:
        raise refusal(found, called)
    return found


def refusal(found: Found, called: str) -> UserError:
    """That no layout fits, why not, and the changes with which one would."""
    misses, asked = found.search.misses, found.question
    reason = f" ({why_not(misses[0], found.search)})" if misses else ""
    remedy = remedies(asked.job, asked.machines, usual_batch=bool(asked.practice))
    return UserError(f"no layout of {called} fits on --cluster = {spelled(asked.machines)}{reason}; give {remedy}")
