"""The reference of compressed gradients: one process that simulates all replicas, one after the other.

Every replica's gradient is computed from its share of the batch, and the replicas' sum is computed as the documented
arithmetic says, with a memory for each of them; nothing is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.data import Step
from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.layout import ranks_of
from meshwright.parallel import OneStage, WholeWeights
from meshwright.parallel.compression import Codec, cut, first_start, make_codec, pays
from meshwright.train import Trainer
from meshwright.verify.observe import Observation, observe
from meshwright.verify.replay import Choices

COMPRESSED_REFERENCE = "reference: one process that compresses as the replicas do"
LOSSLESS = {"compress": "topk", "compress_ratio": 1.0}

Gradients = Mapping[str, Tensor]


def is_lossy(layout: Layout) -> bool:
    """Whether compression between replicas is lossy."""
    return layout.compress != "none" and not all(getattr(layout, field) == value for field, value in LOSSLESS.items())


def only_replicates(layout: Layout) -> bool:
    """Whether a rank holds all of the model and whole sequences: this reference supports nothing else."""
    return ranks_of(layout) == layout.dp_replicate


def observe_compressed(
    job: Job, master: torch.dtype | None, device: str = "cpu", choices: Choices | None = None
) -> Observation:
    """Train in this process alone with gradients compressed as between the job's replicas; return what was observed."""
    alone = job.model_copy(update={"layout": Layout()})
    return observe(alone, master, device, choices, partial(_CompressedTraining, layout=job.layout))


class _CompressedTraining(Trainer):
    """The usual loop over all replicas' gradients."""

    def __init__(self, job: Job, corpus: Any, engine: OneStage, weights: WholeWeights, *rest: Any, layout: Layout):
        *_, world = rest
        super().__init__(job, corpus, _AllReplicas(job, world, engine, weights, layout), weights, *rest)


class _AllReplicas(OneStage):
    """The model run on each replica's share of a step in turn."""

    def __init__(self, job: Job, world: Any, engine: OneStage, weights: WholeWeights, layout: Layout) -> None:
        [model] = engine.modules
        super().__init__(job, world, model, weights)
        self._masters, self._layout = weights.masters, layout
        self._compressed_sum = sum_of_replicas(weights.masters, layout)

    def accumulate(self, data: Step, step: int) -> Tensor:
        """Forward and backward of every share; afterwards the masters have the sum of the compressed gradients."""
        [model] = self.modules
        losses, gradients = [], []
        for share in data.batch.split(len(data.batch) // self._layout.dp_replicate):
            tokens, arguments = self.inputs.training(share, data.valid_count, torch.tensor(step))
            loss = model(tokens, **arguments)
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: master.grad for name, master in self._masters.items() if master.grad is not None})
            self._weights.zero_gradients()
        compresses = step > self._layout.compress_after
        with torch.no_grad():
            for name, total in (self._compressed_sum if compresses else _plain_sum)(gradients).items():
                self._masters[name].grad = total
        self._weights.collect_gradients()
        return torch.stack(losses).sum()


def sum_of_replicas(masters: Gradients, layout: Layout) -> Callable[[Sequence[Gradients]], dict[str, Tensor]]:
    """A function of all replicas' gradients that gives their compressed sum, and remembers what it left out."""
    if layout.compress == "powersgd":
        return _LowRankSum(masters, layout)
    return _EncodedSum(masters, layout)


class _EncodedSum:
    """Buckets of encoded blocks."""

    def __init__(self, masters: Gradients, layout: Layout) -> None:
        self._codec = make_codec(layout)
        self._sum = _sum_gathered if layout.compress == "topk" else _sum_owned
        self._buckets = list(cut(masters, int(layout.bucket_mb * 1e6)))
        self._unsent: dict[tuple[int, int], Tensor] = {}
        """By bucket and replica."""

    def __call__(self, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
        total = {name: torch.empty_like(gradient) for name, gradient in gradients[0].items()}
        for number, bucket in enumerate(self._buckets):
            places = [(part.name, slice(part.start, part.stop)) for part in bucket]
            values = []
            for replica, own in enumerate(gradients):
                flat = torch.cat([own[name].flatten()[place] for name, place in places])
                values.append(flat + self._unsent.get((number, replica), torch.zeros_like(flat)))
            summed, unsent = self._sum(values, self._codec)
            self._unsent |= {(number, replica): rest for replica, rest in enumerate(unsent)}
            parts = torch.split(summed, [place.stop - place.start for _, place in places])
            for (name, place), part in zip(places, parts, strict=True):
                total[name].view(-1)[place] = part
        return total


def _sum_gathered(values: Sequence[Tensor], codec: Codec) -> tuple[Tensor, list[Tensor]]:
    """The sum of what the replicas sent, and what each of them did not."""
    size = len(values[0])
    arrived = [_through(codec, pad(each, (0, -size % codec.block)).view(-1, codec.block)) for each in values]
    sent = [each.flatten()[:size] for each in arrived]
    return torch.stack(sent).sum(dim=0), [own - part for own, part in zip(values, sent, strict=True)]


def _sum_owned(values: Sequence[Tensor], codec: Codec) -> tuple[Tensor, list[Tensor]]:
    """The sum that all replicas decode, and what each of them did not send: a chunk's owner encodes its sum only."""
    count, size = len(values), len(values[0])
    chunks = [pad(each, (0, -size % (count * codec.block))).view(count, -1, codec.block) for each in values]
    unsent = [torch.empty_like(each) for each in chunks]
    summed = torch.empty_like(chunks[0])
    for owner in range(count):
        total = chunks[owner][owner].clone()
        for replica in range(count):
            if replica != owner:
                arrived = _through(codec, chunks[replica][owner])
                unsent[replica][owner] = chunks[replica][owner] - arrived
                total += arrived
        summed[owner] = _through(codec, total)
        unsent[owner][owner] = total - summed[owner]
    return summed.flatten()[:size], [rest.flatten()[:size] for rest in unsent]


def _through(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.dtype)


def _plain_sum(gradients: Sequence[Gradients]) -> dict[str, Tensor]:
    return {name: torch.stack([own[name] for own in gradients]).sum(dim=0) for name in gradients[0]}


class _LowRankSum:
    """All matrices projected on the columns that one power iteration of their sum finds; the rest summed plainly."""

    def __init__(self, masters: Gradients, layout: Layout) -> None:
        rank = layout.compress_rank
        self._starts = {name: first_start(name, m, rank) for name, m in masters.items() if pays(m, rank)}
        self._unsent: dict[tuple[str, int], Tensor] = {}

    def __call__(self, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
        total = _plain_sum(gradients)
        for name, start in self._starts.items():
            matrices = [own[name] + self._unsent.get((name, replica), 0) for replica, own in enumerate(gradients)]
            columns = torch.linalg.qr(sum(matrices, torch.zeros_like(matrices[0])) @ start).Q
            for replica, matrix in enumerate(matrices):
                self._unsent[name, replica] = matrix - columns @ (columns.mT @ matrix)
            projected = columns.mT @ sum(matrices, torch.zeros_like(matrices[0]))
            total[name], self._starts[name] = columns @ projected, projected.mT
        return total
