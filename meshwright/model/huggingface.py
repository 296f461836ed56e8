"""Hugging Face state dicts to and from our parameters, any rows of them at a time."""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model.decoder import Decoder
from meshwright.model.hf_llava import LANGUAGE, published_name
from meshwright.model.hf_places import Size, Span, read_rows, spans_of

Window = tuple[slice, ...]
Read = Callable[[str, Window], Tensor]
"""A window of one of our parameters."""

# Constants that older files contain besides the weights: attention masks, rotary frequencies, places of patches.
_NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids)$")


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a Hugging Face state and the rows of our parameters that it consists of."""

    name: str
    size: tuple[int, ...]
    parts: tuple[tuple[str, Span], ...]
    """Our parameters and which of their rows, in the order in which they are stored."""

    def make(self, read: Read, rows: slice) -> Tensor:
        """Some of its rows, from a function that gives a window of one of our parameters."""
        start, stop, _ = rows.indices(self.size[0])
        if self.parts[0][1].expert is None:
            return _made(read, self.parts, start, stop)
        by_expert = [tuple(parts) for _, parts in groupby(self.parts, key=lambda part: part[1].expert)]
        return torch.stack([_made(read, parts, 0, self.size[1]) for parts in by_expert[start:stop]])


def _made(read: Read, parts: tuple[tuple[str, Span], ...], start: int, stop: int) -> Tensor:
    """Rows start to stop of a stored matrix or vector."""
    first = parts[0][1]
    if first.transposed:
        taken = [read(name, (slice(span.start, span.start + span.rows), slice(start, stop))) for name, span in parts]
        return _joined(taken, first.step).t()
    if first.step > 1:  # biases of an expert: short enough to be read whole
        taken = [read(name, (slice(span.start, span.start + span.rows),)) for name, span in parts]
        return _joined(taken, first.step)[start:stop]
    taken = []
    for name, span in parts:
        low, high = max(start, span.first), min(stop, span.first + span.rows)
        if low < high:
            taken.append(read(name, (slice(span.start + low - span.first, span.start + high - span.first),)))
    return _joined(taken, 1)


def _joined(taken: list[Tensor], step: int) -> Tensor:
    """Rows after one another, or alternating."""
    if step > 1:
        return torch.stack(taken, dim=1).flatten(0, 1)
    return taken[0] if len(taken) == 1 else torch.cat(taken)


def hf_rows(
    shape: Model, name: str, size: Size, rows: slice, stored: Container[str], read: Callable[..., Tensor]
) -> Tensor:
    """Some rows of our parameter `name`: read(tensor, take) gives what `take` slices out of a stored tensor."""
    spans = spans_of(shape, name, size, stored)
    found = read_rows(
        spans, rows, size, lambda span, start, stop: read(span.tensor, partial(span.read, start=start, stop=stop))
    )
    return found[0] if len(found) == 1 else torch.cat(found)


def hf_tensors(shape: Model, sizes: Mapping[str, Size], stored: Container[str] = ()) -> list[HfTensor]:
    """The tensors a Hugging Face state of this shape has, from our parameters and their sizes.

    As published files have them, except where those of `stored` are fused.
    """
    made: dict[str, list[tuple[str, Span]]] = {}
    for name, size in sizes.items():
        for span in spans_of(shape, name, size, stored):
            made.setdefault(span.tensor, []).append((name, span))
    return [_tensor(stored_as, parts, sizes) for stored_as, parts in made.items()]


def _tensor(name: str, parts: list[tuple[str, Span]], sizes: Mapping[str, Size]) -> HfTensor:
    parts.sort(key=lambda part: (part[1].expert or 0, part[1].first))
    span = parts[0][1]
    experts = {span.expert for _, span in parts}
    rows, columns = sum(span.rows for _, span in parts) // len(experts), tuple(sizes[parts[0][0]][1:])
    matrix = (*columns, rows) if span.transposed else (rows, *columns)
    return HfTensor(name, matrix if span.expert is None else (len(experts), *matrix), tuple(parts))


def written_hf_tensors(shape: Model, sizes: Mapping[str, Size]) -> list[HfTensor]:
    """The tensors a folder of this shape is written with, in the form of published files.

    Blocks of extra tokens are part of it in DeepSeek-V3's family only, each with a copy of the embedding and the head;
    others have no place for them.
    """
    if shape.latent is None or shape.experts is None or shape.experts.scores != "sigmoid":
        return hf_tensors(shape, {name: size for name, size in sizes.items() if not _is_extra(shape, name)})
    tensors = hf_tensors(shape, sizes)
    for layer in range(shape.layers, shape.blocks):
        for copy, name in (("embed_tokens", "embed"), ("shared_head.head", "embed" if shape.tied else "head")):
            size, full = tuple(sizes[f"{name}.weight"]), f"model.layers.{layer}.{copy}.weight"
            tensors.append(HfTensor(full, size, ((f"{name}.weight", Span(full, 0, size[0])),)))
    return tensors


def _is_extra(shape: Model, name: str) -> bool:
    """Whether one of our parameters is of a block that predicts an extra token."""
    return name.startswith("layers.") and int(name.split(".")[1]) >= shape.layers


def preference_sizes(shape: Model) -> dict[str, tuple[int, ...]]:
    """The routers' preferences that a state has besides our parameters (DeepSeek-V3), by their names in the model."""
    experts = shape.experts
    if experts is None or experts.scores != "sigmoid":
        return {}
    layers = range(experts.first_dense, shape.blocks)
    return {f"layers.{layer}.moe.router.preference": (experts.count,) for layer in layers}


def full_hf_names(shape: Model, stored: Iterable[str]) -> dict[str, str]:
    """The names that transformers itself writes → the names found; GPT-2's published files leave out a prefix, and
    versions of transformers name the parts of LLaVA differently."""
    found = list(stored)
    if shape.vision is not None:
        return {published_name(name): name for name in found}
    bare = shape.positions == "learned" and "wte.weight" in found
    return {(f"transformer.{name}" if bare else name): name for name in found}


def require_hf_tensors(shape: Model, sizes: Mapping[str, Size], stored: Mapping[str, Size]) -> None:
    """Refuse by name what a state (full name → size) lacks, has unused, or has in another size."""
    unused = {name for name in stored if not _NOT_WEIGHTS.search(name) and not _is_extra_layer(shape, name)}
    if shape.tied:
        unused.discard(hf_head(shape))
    for tensor in hf_tensors(shape, sizes, stored):
        if tensor.name not in stored and _is_extra(shape, tensor.parts[0][0]):
            raise UserError(
                f"the weights lack {tensor.name}, which model.extra_tokens = {shape.extra_tokens} needs; set "
                "model.extra_tokens = 0"
            )
        if tensor.name not in stored:
            raise UserError(
                f"the weights lack {tensor.name}, which {tensor.parts[0][0]} is read from; give the folder of a "
                "complete model"
            )
        if tuple(stored[tensor.name]) != tensor.size:
            raise UserError(
                f"{tensor.name} has shape {tuple(stored[tensor.name])} but the model needs {tensor.size}; take "
                "the model section from the same folder"
            )
        unused.discard(tensor.name)
    if unused:
        raise UserError(f"the weights contain {min(unused)}, which the model does not use; check its model_type")


def hf_head(shape: Model) -> str:
    """The name of the head's weight in a state."""
    return "lm_head.weight" if shape.vision is None else f"{LANGUAGE}lm_head.weight"


def _is_extra_layer(shape: Model, name: str) -> bool:
    """Whether a tensor is of the layers after the last that predict further tokens in DeepSeek-V3: they are ignored
    unless the shape has extra tokens, and then, too, their copies of the embedding and the head are."""
    found = re.match(r"model\.layers\.(\d{1,6})\.", name)
    return shape.latent is not None and found is not None and int(found[1]) >= shape.layers


def load_hf_state(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy a Hugging Face state dict into the decoder; every tensor must be used and none missing."""
    named = {full: state[found] for full, found in full_hf_names(decoder.shape, state).items()}
    ours = _tensors_of(decoder)
    sizes = {name: tensor.shape for name, tensor in ours.items()}
    require_hf_tensors(decoder.shape, sizes, {name: tensor.shape for name, tensor in named.items()})
    for name, tensor in ours.items():
        tensor.copy_(
            hf_rows(decoder.shape, name, tensor.shape, slice(None), named, lambda stored, take: take(named[stored]))
        )


def to_hf_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's parameters and preferences under Hugging Face names; a tied head appears once, as the embedding."""
    ours = _tensors_of(decoder)
    sizes = {name: tensor.shape for name, tensor in ours.items()}
    return {
        tensor.name: tensor.make(lambda name, window: ours[name][window], slice(None)).contiguous()
        for tensor in written_hf_tensors(decoder.shape, sizes)
    }


def _tensors_of(decoder: Decoder) -> dict[str, Tensor]:
    """Parameters and preferences by their names, without history."""
    preferences = {name: decoder.get_buffer(name) for name in preference_sizes(decoder.shape)}
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()} | preferences
