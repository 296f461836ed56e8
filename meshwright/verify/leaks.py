"""Whether an output depends on what it must not see: a later token, or a token of another document.

Every layout computes such an output as one process does, so comparing them shows nothing. Instead one process changes a
token and compares the outputs before it, and those of other documents. B sequences, S tokens, K slots for items.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.model import IGNORE, Documents, Media
from meshwright.parallel import build, join_world
from meshwright.verify.compare import Comparison
from meshwright.verify.observe import enliven
from meshwright.verify.ranks import run_ranks

BOUND = 1e-9
TIMEOUT_S = 180.0


def leaks_of_own_model(job: Job) -> list[Comparison]:
    """What a model of the user's own (model.file) lets through; the job is one for a single process."""
    return [] if job.model.file is None else list(_in_fork(job.model_dump_json()))


@lru_cache(maxsize=64)
def _in_fork(job_json: str) -> tuple[Comparison, ...]:
    # Forked as the ranks are: a process that has computed has thread pools, and cannot safely fork again.
    return tuple(run_ranks(find_leaks, 1, Job.model_validate_json(job_json), timeout_s=TIMEOUT_S)[0])


@torch.no_grad()
def find_leaks(job: Job) -> list[Comparison]:
    """Change later tokens, and tokens of other documents if documents are masked; one comparison for each."""
    # A loss of the user's own may compare tokens; this is about what the model computes before it.
    job = job.model_copy(update={"model": job.model.model_copy(update={"loss": "cross-entropy"})})
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world, torch.float64)
    enliven(weights, engine.modules)
    return [_first_leak(job, engine.modules[0], probes) for probes in _probes(job)]


@dataclass(frozen=True)
class _Probe:
    """A change of one token, or of one item that the model encodes, and the outputs that must not change with it."""

    place: int
    """Of the token, or of the item's first one."""
    outputs: tuple[int, ...]
    item: int | None = None


def _probes(job: Job) -> list[list[_Probe]]:
    """Those of later tokens, and those of other documents."""
    documents_S, places = _documents(job), range(job.batch.sequence_length)
    masked = job.data.mask_documents
    sources = [(place, None) for place in places] + [(int(row[0]), item) for item, row in enumerate(_item_places(job))]
    later, other = [], []
    for place, item in sources:
        if place < 0:  # an empty slot
            continue
        apart = [output for output in places if masked and documents_S[output] != documents_S[place]]
        before = [output for output in range(place) if output not in apart]
        later.append(_Probe(place, tuple(before), item))
        other.append(_Probe(place, tuple(apart), item))
    return [[probe for probe in probes if probe.outputs] for probes in (later, other)][: 1 + masked]


def _documents(job: Job) -> list[int]:
    """The document of every token: three of unequal length."""
    length = job.batch.sequence_length
    return [(place >= length // 3) + (place >= length // 3 + length // 4) for place in range(length)]


def _item_places(job: Job) -> Tensor:
    """The places (K, T) of items: the first in the first document and the second in the last, after a token each."""
    encoder, documents_S = job.model.encoder, _documents(job)
    if encoder is None:
        return torch.empty(0, 0, dtype=torch.int64)
    places_KT = torch.full((encoder.slots, encoder.tokens), -1)
    for item, document in zip(range(encoder.slots), (0, 2), strict=False):
        first = documents_S.index(document) + 1
        if documents_S[first : first + encoder.tokens] == [document] * encoder.tokens:
            places_KT[item] = torch.arange(first, first + encoder.tokens)
    return places_KT


def _first_leak(job: Job, model: nn.Module, probes: Sequence[_Probe]) -> Comparison:
    """All probes at once, a sequence for each; only where that shows a difference they are made one by one."""
    name = "later tokens" if probes[0].place > max(probes[0].outputs) else "other documents"
    error = _difference(job, model, probes)
    if error <= BOUND:
        return Comparison("leak", name, error, BOUND)
    for probe in probes:
        for output in probe.outputs:
            error = _difference(job, model, [replace(probe, outputs=(output,))])
            if not error <= BOUND:  # a NaN, too
                return Comparison("leak", name, error, BOUND, _sentence(job, probe, output))
    return Comparison("leak", name, 0.0, BOUND)  # one sequence of a batch depends on another: layouts differ then


def _difference(job: Job, model: nn.Module, probes: Sequence[_Probe]) -> float:
    """How much the probes change the outputs that must not change."""
    generator = torch.Generator().manual_seed(job.run.seed)
    vocabulary, length = job.model.vocab_size, job.batch.sequence_length
    tokens_S = torch.randint(vocabulary, (length,), generator=generator)
    targets_S = torch.randint(vocabulary, (length,), generator=generator)
    tokens_BS = tokens_S.repeat(len(probes), 1)
    watched_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
    changed_BS, arguments = tokens_BS.clone(), _arguments(job, len(probes), generator)
    changed = dict(arguments)
    if "media" in arguments:
        changed["media"] = arguments["media"].map(Tensor.clone)
    for row, probe in enumerate(probes):
        watched_BS[row, list(probe.outputs)] = True
        changed_BS[row, probe.place] = (tokens_S[probe.place] + 1) % vocabulary
        if probe.item is not None:
            changed["media"].items_BK[row, probe.item] += 1.0

    def response(inputs_BS: Tensor, others: dict[str, Any]) -> float:
        # Losses of two targets, less each other: what a model adds to its loss (of its router, say) may depend on all.
        losses = []
        for shift in (0, 1):
            labels_BS = torch.where(watched_BS, (targets_S + shift) % vocabulary, IGNORE)
            torch.manual_seed(0)  # for a dropout that is not ours
            losses.append(model(inputs_BS, labels=labels_BS, valid_count=1, **others))
        return float(losses[0] - losses[1])

    before, after = response(tokens_BS, arguments), response(changed_BS, changed)
    return abs(after - before) / max(1.0, abs(before))


def _arguments(job: Job, sequences: int, generator: torch.Generator) -> dict[str, Any]:
    """What a model is called with besides tokens and labels, as in training."""
    documents_S, documents, positions = _documents(job), None, None
    if job.data.mask_documents:
        documents = Documents(torch.tensor(documents_S).repeat(sequences, 1))
        positions = torch.tensor([place - documents_S.index(number) for place, number in enumerate(documents_S)])
        positions = positions.repeat(sequences, 1)
    arguments: dict[str, Any] = {"positions": positions, "documents": documents, "draws": None}
    if (encoder := job.model.encoder) is not None:
        items_K = torch.randn(encoder.slots, *encoder.item_shape, generator=generator, dtype=torch.float64)
        places_BKT = _item_places(job).repeat(sequences, 1, 1)
        arguments["media"] = Media(items_K.repeat(sequences, *[1] * items_K.dim()), places_BKT)
    return arguments


def _sentence(job: Job, probe: _Probe, output: int) -> str:
    subject = "the model" if job.model.file is None else f'model.file = "{job.model.file}"'
    documents_S = _documents(job)
    if documents_S[output] == documents_S[probe.place] or not job.data.mask_documents:
        return (
            f"{subject}: the output at position {output} depends on token {probe.place}, which comes later; let no "
            "token attend to a later one"
        )
    return (
        f"{subject}: the output at position {output} in document {documents_S[output]} depends on token {probe.place} "
        f"in document {documents_S[probe.place]} despite data.mask_documents = true; let attention use `documents`"
    )
