"""Preference training around the step: what the start weights give every pair, and how held-out pairs are scored."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data import Batch, Blank, Corpus, References, Stream, training_stream, window_batches
from meshwright.data.store import Int64Array
from meshwright.job import Job, Preference
from meshwright.model import pair_losses, tallied
from meshwright.parallel import Engine, World
from meshwright.train.feed import evaluates, held_out_batches

_AT_ONCE = 16
"""Batches per rank that are loaded at a time."""


@dataclass(frozen=True)
class Answers:
    """Pairs by where they begin, with the sums of log-probabilities of both answers and their numbers of tokens."""

    starts_N: Int64Array
    sums_N2: Tensor
    counts_N2: Tensor


@dataclass(frozen=True)
class PairReferences:
    """What the start weights give the pairs of a run: those it trains on, and those it is evaluated on."""

    train: References
    validation: References


@dataclass(frozen=True)
class PairScore:
    """How a model orders pairs: means over them."""

    loss: float
    reward_chosen: float
    reward_rejected: float
    accuracy: float
    """Share of pairs whose chosen answer has the higher reward; of equal ones half."""
    pairs: int


BLANK = PairReferences(Blank(), Blank())


def find_references(job: Job, corpus: Corpus, engine: Engine, world: World) -> PairReferences:
    """Sums of log-probabilities by the weights that the engine has now, for all pairs the run reads; all ranks call
    this together. A loss without a reference gets zeros."""
    if not job.preference.needs_reference:
        return BLANK
    stream = training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)
    train = _references(answers_of(engine, _trained_batches(job, stream), world))
    if not evaluates(job):
        return PairReferences(train, Blank())
    return PairReferences(train, _references(answers_of(engine, held_out_batches(job, corpus), world)))


def covers(references: PairReferences, job: Job, corpus: Corpus) -> bool:
    """Whether there is a reference for every pair that the run reads."""
    stream = training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)
    held_out = held_out_batches(job, corpus) if evaluates(job) else iter(())
    return all(
        known.knows(starts)
        for known, batches in ((references.train, _trained_batches(job, stream)), (references.validation, held_out))
        for batch in batches
        for starts in batch.pairs or ()
    )


def score_pairs(
    engine: Engine, batches: Iterable[Batch], world: World, references: References, settings: Preference
) -> PairScore:
    """The loss and the rewards of held-out pairs; the same on every rank."""
    found = answers_of(engine, batches, world)
    known_N2 = torch.from_numpy(references.of([found.starts_N])[0]).to(found.sums_N2)
    losses_N, rewards_N2 = pair_losses(found.sums_N2, found.counts_N2, known_N2, settings)
    pairs = len(found.starts_N)
    sums = [losses_N.sum(), *tallied(rewards_N2, torch.ones_like(losses_N, dtype=torch.bool))]
    loss, chosen, rejected, accuracy = (float(total) / max(1, pairs) for total in sums)
    return PairScore(loss, chosen, rejected, accuracy, pairs)


def answers_of(engine: Engine, batches: Iterable[Batch], world: World) -> Answers:
    """What the engine gives every pair of some batches, each once, ordered by where it begins; the same on every rank.

    The batches are split over data-parallel ranks, which all get all results.
    """
    iterator = iter(batches)
    starts: list[Int64Array] = [np.empty(0, np.int64)]
    totals = [torch.empty(2, 0, 2, dtype=torch.float64)]
    while everyones := list(islice(iterator, _AT_ONCE * world.data_ranks)):
        starts += [own for batch in everyones for own in batch.pairs or ()]
        totals.append(_totals(engine, everyones, world))
    found, first = np.unique(np.concatenate(starts), return_index=True)
    sums_N2, counts_N2 = torch.cat(totals, 1)[:, torch.from_numpy(first)]
    return Answers(found, sums_N2, counts_N2)


def _totals(engine: Engine, everyones: Sequence[Batch], world: World) -> Tensor:
    """Sums and counts (2, N, 2) of the pairs of some batches in order."""
    turns = [everyones[first : first + world.data_ranks] for first in range(0, len(everyones), world.data_ranks)]
    # Sharded parameters are gathered collectively: a rank without its own batch keeps step with another's.
    mine = [turn[world.data_rank] if world.data_rank < len(turn) else turn[0] for turn in turns]
    results = engine.held_out(mine)
    # Ranks that split the model or the sequence have the same sums, or zeros where the last stage is another's.
    counts = not (world.axis_rank("tp") or world.axis_rank("cp"))
    totals = []
    for turn, result in zip(turns, results, strict=True):
        for rank, batch in enumerate(turn):
            own = counts and rank == world.data_rank and result.dim() > 0
            for row, starts in enumerate(batch.pairs or ()):
                zeros = torch.zeros(2, len(starts), 2, dtype=torch.float64, device=world.device)
                totals.append(result[:, row, : len(starts)].double() if own else zeros)
    whole = torch.cat(totals, 1).contiguous()
    if world.size > 1:
        dist.all_reduce(whole)
    return whole.cpu()


def _references(answers: Answers) -> References:
    return References(answers.starts_N, answers.sums_N2.numpy())


def _trained_batches(job: Job, stream: Stream) -> Iterator[Batch]:
    """The windows that the run's steps read, each once, in micro-batches."""
    samples = job.run.steps * job.batch.global_batch
    if stream.blend is None and samples >= len(stream.parts[0]):
        places = [(0, window) for window in range(len(stream.parts[0]))]
    else:
        places = sorted({stream.place(sample) for sample in range(samples)})
    for part, windows in enumerate(stream.parts):
        own = [window for source, window in places if source == part]
        if own:
            yield from window_batches(windows, own, job.batch.micro_batch)
