"""Set up a trainer: the model in its layout, the optimizer, the checkpoint saver, and the state to resume from."""

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from meshwright.checkpoint import Saver
from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import is_asynchronous
from meshwright.parallel import Engine, PipeDream, Weights, World, build, host_buffer
from meshwright.train.asynchronous import AsynchronousTrainer
from meshwright.train.kernels import choose_attention
from meshwright.train.links import try_links
from meshwright.train.preference import BLANK, PairReferences, covers, find_references
from meshwright.train.recorder import Progress, Recorder
from meshwright.train.reference_file import FILE, IMPORTED, read_references, start_identity, write_references
from meshwright.train.start import Start
from meshwright.train.trainer import Trainer


def set_up_trainer(
    job: Job,
    corpus: Corpus,
    world: World,
    start: Start,
    recorder: Recorder,
    progress: Progress,
    record_memory: Callable[[dict[str, Any]], None] | None = None,
    attention: dict[str, Any] | None = None,
) -> Trainer:
    """Build this rank's part of the model and everything that trains it, and resume; all ranks call this together.

    `attention` is the kernel an earlier attempt chose, `record_memory` receives the memory curve of the first steps.
    """
    start.activity.at("building the model")
    kernels = choose_attention(job, world, attention)
    kept = _kept_references(job, corpus, start)
    # A later attempt has no use for the first weights, unless it reads pairs that they were not asked about yet.
    first = start.checkpoint is None or (kept is None and start.step != 0)
    engine, weights = build(job if first else _without_first_weights(job), world, start.dtype)
    if kernels is not None:
        recorder.event("attention", **kernels)
    trainer = make_trainer(job, corpus, engine, weights, recorder, progress, world)
    trainer.attempt, trainer.activity, trainer.pass_over = start.lease.attempt, start.activity, start.pass_over
    if record_memory is not None:
        trainer.watch_memory(record_memory)
    trainer.saver = Saver(
        job,
        start.lease,
        recorder.event,
        progress.message,
        lambda size: host_buffer(size, torch.uint8, world.device),
        rank=world.rank,
        ranks=world.size,
        sums=world.sum_over_world,
        saved_step=start.step,
        flush=recorder.flush,
        alive=start.activity.at,
    )
    if first and job.prefers:
        trainer.refer_to(kept or _find_references(job, corpus, engine, world, start, recorder, progress))
    if start.checkpoint is not None:
        trainer.resume(start.checkpoint)
    if not first and job.prefers:
        trainer.refer_to(kept or _find_references(job, corpus, engine, world, start, recorder, progress))
    try_links(world, recorder, progress, start.activity)
    return trainer


def make_trainer(
    job: Job,
    corpus: Corpus,
    engine: Engine | PipeDream,
    weights: Weights,
    recorder: Recorder,
    progress: Progress,
    world: World,
) -> Trainer:
    """The trainer that fits the engine `build` made."""
    if is_asynchronous(job):
        return AsynchronousTrainer(job, corpus, engine, weights, recorder, progress, world)  # type: ignore[arg-type]
    return Trainer(job, corpus, cast(Engine, engine), weights, recorder, progress, world)


def _kept_references(job: Job, corpus: Corpus, start: Start) -> PairReferences | None:
    """What an earlier attempt kept, if it is enough for this one."""
    if not job.prefers or not job.preference.needs_reference:
        return BLANK
    found = read_references(start.lease.run, job, corpus)
    if found is not None and covers(found[0], job, corpus):
        return found[0]
    if (start.step or 0) > 0 and (found is None or found[1] == IMPORTED):
        missing = "is lost" if found is None else f"has too few pairs for run.steps = {job.run.steps}"
        raise UserError(
            f"{start.lease.run / FILE} {missing}, and the weights that gave it are no longer there; restore it, or "
            "start a new run with another run.folder"
        )
    return None


def _find_references(
    job: Job,
    corpus: Corpus,
    engine: Engine | PipeDream,
    world: World,
    start: Start,
    recorder: Recorder,
    progress: Progress,
) -> PairReferences:
    """Run the start weights over all pairs the run reads, and keep what they give."""
    start.activity.at("log-probabilities of the start weights")
    began = time.perf_counter()
    found = find_references(job, corpus, cast(Engine, engine), world)
    pairs, seconds = len(found.train.starts_N) + len(found.validation.starts_N), time.perf_counter() - began
    recorder.event("reference", pairs=pairs, seconds=seconds)
    progress.message(f"reference: log-probabilities of {pairs:,} pairs by the start weights, {seconds:.1f} s")
    if world.rank == 0:
        identity = IMPORTED if start.checkpoint is not None and start.step == 0 else start_identity(job)
        write_references(start.lease.run, found, corpus, identity or IMPORTED)
    return found


def _without_first_weights(job: Job) -> Job:
    """A resumed run no longer needs the folder it started from, unless it trains adapters of what is there."""
    return job.model_copy(update={"model": job.model.resumed})
