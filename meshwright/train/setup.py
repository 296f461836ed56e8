"""Set up a trainer: the model in its layout, the optimizer, the checkpoint saver, and the state to resume from."""

from collections.abc import Callable
from typing import Any, cast

import torch

from meshwright.checkpoint import Saver
from meshwright.data import Corpus
from meshwright.job import Job
from meshwright.layout import is_asynchronous
from meshwright.parallel import Engine, PipeDream, Weights, World, build, host_buffer
from meshwright.train.asynchronous import AsynchronousTrainer
from meshwright.train.kernels import choose_attention
from meshwright.train.links import try_links
from meshwright.train.recorder import Progress, Recorder
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
    engine, weights = build(job if start.checkpoint is None else _without_first_weights(job), world, start.dtype)
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
        alive=lambda: start.activity.at("waiting for disk space"),
    )
    if start.checkpoint is not None:
        trainer.resume(start.checkpoint)
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


def _without_first_weights(job: Job) -> Job:
    """A resumed run no longer needs the folder it started from, unless it trains adapters of what is there."""
    return job.model_copy(update={"model": job.model.resumed})
