"""Evaluate a run's newest weights on texts: its own held-out text, and any others."""

from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.checkpoint import Checkpoint, newest_weights, require_base, require_shapes
from meshwright.data import evaluation_windows, validation_batches
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError
from meshwright.job.devices import Layout
from meshwright.parallel import Weights, World, build
from meshwright.runs.folder import RunFolder
from meshwright.train import Score, choose_device, evaluated_sequences, held_out_batches, open_corpus, score

HELD_OUT = "held-out"
_ALL = 1 << 40


def evaluate_run(
    run: Path, sets: Mapping[str, str], device: str, batches: int | None, trust: bool = False
) -> tuple[dict[str, Score], int]:
    """The scores of named sets, or of the run's own held-out text if none is given, and the step of the weights."""
    saved = RunFolder.open(run).resolved_job(trust=trust)
    limit = _ALL if batches is None else batches
    job = saved.model_copy(
        update={
            "run": saved.run.model_copy(update={"device": device}),
            "layout": Layout(),
            "evaluation": saved.evaluation.model_copy(update={"batches": limit}),
            "model": saved.model.resumed,
        }
    )
    world = World(choose_device(job))
    checkpoint = newest_weights(run)
    if not (run / "tokenizer.json").is_file():
        raise UserError(f"{run} has no tokenizer.json (its tokens are synthetic or came without one); use another run")
    tokenizer = load_tokenizer(run / "tokenizer.json", str(run / "tokenizer.json"))
    size = job.batch.sequence_length
    if sets:
        read = {
            name: validation_batches(
                evaluation_windows("--data", source, tokenizer, job.data, job.model.vocab_size, size),
                job.batch.micro_batch,
                evaluated_sequences(job),
            )
            for name, source in sets.items()
        }
    else:
        if job.prefers:
            raise UserError(
                f"{run} was trained on pairs of answers, and its metrics have how it orders those held out "
                "(val_accuracy); give a text with --data"
            )
        if job.data.validation_fraction == 0:
            raise UserError(f"{run} held out no text (data.validation_fraction = 0); give a text with --data")
        read = {HELD_OUT: held_out_batches(job, open_corpus(job))}
    engine, weights = build(job, world)
    require_base(checkpoint, job.model, weights.base)
    _load(checkpoint, weights)
    lengths = tokenizer.byte_lengths()
    return {name: score(engine, found, world, lengths) for name, found in read.items()}, checkpoint.facts.step


@torch.no_grad()
def _load(checkpoint: Checkpoint, weights: Weights) -> None:
    shards = weights.shards()
    require_shapes(checkpoint, {name: shard.shape for name, shard in shards.items()}, whole=True)
    with checkpoint:
        for name, master in weights.masters.items():
            master.copy_(checkpoint.read(f"model/{name}", shards[name].box()))
    weights.refresh()
