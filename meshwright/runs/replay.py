"""Recompute a recorded step on one device: its loss, its gradient norm, and the loss of every sample."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshwright.checkpoint import Checkpoint, checkpoints
from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Layout, Memory
from meshwright.layout import require_layout
from meshwright.parallel import World, build
from meshwright.runs.folder import RunFolder
from meshwright.runs.lifecycle import prepare_data
from meshwright.runs.rehearsed import require_training
from meshwright.train import Silent, Trainer, choose_device, make_trainer, prepare_device, training_loader

_TEXT = 200
"""Characters of a sample to show."""


@dataclass(frozen=True)
class ReplayedSample:
    """One sequence of the batch."""

    sample: int
    """Its number in the global stream."""
    loss: float
    tokens: int
    text: str | None


@dataclass(frozen=True)
class Replay:
    """The result of recomputing a step, and what was recorded."""

    step: int
    position: int
    loss: float
    grad_norm: float
    recorded_loss: float | None
    recorded_grad_norm: float | None
    from_step: int
    """The step of the checkpoint it started from; the steps between were recomputed too."""
    samples: tuple[ReplayedSample, ...]
    """Highest loss first."""


def replay(run: Path, step: int, device: str, console: Console, trust: bool = False) -> Replay:
    """Recompute a step of a run, from the last checkpoint before it or the initial weights; nothing is written."""
    folder = RunFolder.open(run)
    require_training(run)
    job = _alone(folder.resolved_job(trust=trust), device)
    if not 1 <= step <= job.run.steps:
        raise UserError(f"--step {step} is not a step of {run}; give one from 1 to {job.run.steps}")
    if job.prefers:
        raise UserError(f"{run} was trained on pairs of answers, and replay shows losses of tokens; use a run of text")
    if job.data.stream:
        raise UserError(f"{run} streams its data, which cannot go back to a step; prepare the data instead")
    require_layout(job, 1)
    world = World(choose_device(job))
    prepare_device(job, world.device)
    corpus = prepare_data(job, console)
    checkpoint = next((one for one in _sound(run) if one.facts.step < step), None)
    engine, weights = build(job, world)
    training = make_trainer(job, corpus, engine, weights, Silent(), Silent(), world)
    if checkpoint is not None:
        training.resume(checkpoint)
    passed_over = [event for event in folder.events("passed_over") if event.get("position") is not None]
    training.pass_over = frozenset(event["position"] for event in passed_over)
    began = training.outcome.step
    if began < step - 1:
        with console.status(f"recomputing steps {began + 1} to {step - 1}"):
            training.run(stop=lambda: training.outcome.step >= step - 2)
    bad = [event for event in folder.events("bad_step") if event.get("step") == step]
    bad = [event for event in bad if event.get("position") is not None]
    rows = [row for row in folder.step_rows(step) if "loss" in row]
    recorded = bad[-1] if bad else rows[-1] if rows else {}
    position = bad[-1]["position"] if bad else training.position
    loss, norm, samples = _look(training, corpus, step, position)
    report = (recorded.get("loss"), recorded.get("grad_norm"))
    return Replay(step, position, loss, norm, *report, began, samples)


def _look(
    training: Trainer, corpus: Corpus, step: int, position: int
) -> tuple[float, float, tuple[ReplayedSample, ...]]:
    """The step's loss and gradient norm, and each sample's loss without dropout."""
    job, engine, weights = training.job, training.engine, training.weights
    loader = training_loader(job, corpus, training.world, position)
    try:
        data = next(loader)
    finally:
        loader.close()
    parts = data.batch.split(1)
    sums = [float(total) for total in engine.held_out(parts)]
    loss = float(engine.accumulate(data, step))
    squares = float(weights.square_sum())
    weights.zero_gradients()
    samples = [
        ReplayedSample(
            int(part.sample_ids_B[0]),
            total / max(1, part.valid_count()),
            part.valid_count(),
            None if corpus.tokenizer is None else corpus.tokenizer.decode(part.tokens_BS[0].tolist())[:_TEXT],
        )
        for part, total in zip(parts, sums, strict=True)
    ]
    samples.sort(key=lambda sample: (math.isfinite(sample.loss), -sample.loss if math.isfinite(sample.loss) else 0.0))
    return loss, math.sqrt(squares) if squares >= 0 else squares, tuple(samples)


def _alone(job: Job, device: str) -> Job:
    """The job on one device, with no stop conditions; another layout computes the same."""
    run = job.run.model_copy(update={"device": device, "compile": False, "on_bad_step": "keep", "spike_score": 0.0})
    evaluation = job.evaluation.model_copy(update={"every_steps": 0})
    return job.model_copy(update={"run": run, "layout": Layout(), "memory": Memory(), "evaluation": evaluation})


def _sound(run: Path) -> Iterator[Checkpoint]:
    for one in checkpoints(run):
        if isinstance(one, Checkpoint):
            yield one
