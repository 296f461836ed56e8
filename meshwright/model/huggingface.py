"""Hugging Face state dicts of Llama, Mistral, Qwen2, Qwen3 and GPT-2, to and from our parameters."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model.decoder import Decoder

Size = Sequence[int]
Window = tuple[slice, ...]
_LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.o": "model.layers.{}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn.gate": "model.layers.{}.mlp.gate_proj",
    "ffn.up": "model.layers.{}.mlp.up_proj",
    "ffn.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_GPT2_NAMES = {
    "embed": "transformer.wte",
    "position_embed": "transformer.wpe",
    "attention_norm": "transformer.h.{}.ln_1",
    "attention.q": "transformer.h.{}.attn.c_attn",
    "attention.k": "transformer.h.{}.attn.c_attn",
    "attention.v": "transformer.h.{}.attn.c_attn",
    "attention.o": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn.up": "transformer.h.{}.mlp.c_fc",
    "ffn.down": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_FUSED = ("attention.q", "attention.k", "attention.v")
_GPT2_TRANSPOSED = (*_GPT2_FUSED, "attention.o", "ffn.up", "ffn.down")

# Constants that older files contain besides the weights: attention masks and rotary frequencies.
_NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class HfPlace:
    """Where one of our parameters is in a Hugging Face state: a tensor, perhaps transposed, or a third of it."""

    name: str
    transposed: bool = False
    third: int | None = None

    def stored_size(self, size: Size) -> tuple[int, ...]:
        """The size of the stored tensor for our parameter's size."""
        rows = size[0] * (1 if self.third is None else 3)
        return (size[1], rows) if self.transposed else (rows, *size[1:])

    def read(self, stored: Any, size: Size, rows: slice) -> Tensor:
        """Rows of our parameter of this size out of the stored tensor, or out of anything that is sliced like one."""
        start, stop, _ = rows.indices(size[0])
        first = (self.third or 0) * size[0]
        own = slice(first + start, first + stop)
        taken: Tensor = stored[:, own].t() if self.transposed else stored[own]
        return taken


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a Hugging Face state and our parameters that it consists of."""

    name: str
    size: tuple[int, ...]
    parts: tuple[str, ...]
    transposed: bool

    def make(self, read: Callable[[str, Window], Tensor], rows: slice) -> Tensor:
        """Some of its rows, from a function that gives a window of one of our parameters."""
        if self.transposed:
            return torch.cat([read(part, (slice(None), rows)).t() for part in self.parts], dim=1)
        if len(self.parts) > 1:  # fused biases: short enough to be read whole
            return torch.cat([read(part, (slice(None),)) for part in self.parts])[rows]
        return read(self.parts[0], (rows,))


def hf_place(shape: Model, name: str) -> HfPlace:
    """Where our parameter `name` is in the state of this shape's Hugging Face family."""
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    if shape.tied and module == "head":
        module = "embed"
    names = _GPT2_NAMES if shape.positions == "learned" else _LLAMA_NAMES
    if module not in names:
        raise UserError(
            f"parameter {name} does not exist in a Hugging Face model of this kind; export only shapes that it supports"
        )
    stored = f"{names[module].format(layer)}.{kind}"
    if names is _LLAMA_NAMES:
        return HfPlace(stored)
    third = _GPT2_FUSED.index(module) if module in _GPT2_FUSED else None
    return HfPlace(stored, module in _GPT2_TRANSPOSED and kind == "weight", third)


def hf_tensors(shape: Model, sizes: Mapping[str, Size]) -> list[HfTensor]:
    """The tensors a Hugging Face state of this shape has, from our parameters and their sizes."""
    made: dict[str, list[tuple[str, HfPlace]]] = {}
    for name in sizes:
        place = hf_place(shape, name)
        made.setdefault(place.name, []).append((name, place))
    tensors = []
    for stored, parts in made.items():
        parts.sort(key=lambda part: part[1].third or 0)
        first, place = parts[0]
        names = tuple(name for name, _ in parts)
        tensors.append(HfTensor(stored, place.stored_size(sizes[first]), names, place.transposed))
    return tensors


def full_hf_names(shape: Model, stored: Iterable[str]) -> dict[str, str]:
    """The names that transformers itself writes → the names found; GPT-2's published files leave out a prefix."""
    found = list(stored)
    bare = shape.positions == "learned" and "wte.weight" in found
    return {(f"transformer.{name}" if bare else name): name for name in found}


def require_hf_tensors(shape: Model, sizes: Mapping[str, Size], stored: Mapping[str, Size]) -> None:
    """Refuse by name what a state (full name → size) lacks, has unused, or has in another size."""
    unused = {name for name in stored if not _NOT_WEIGHTS.search(name)}
    if shape.tied:
        unused.discard("lm_head.weight")
    for tensor in hf_tensors(shape, sizes):
        if tensor.name not in stored:
            raise UserError(
                f"the weights lack {tensor.name}, which {tensor.parts[0]} is read from; give the folder of a complete "
                "model"
            )
        if tuple(stored[tensor.name]) != tensor.size:
            raise UserError(
                f"{tensor.name} has shape {tuple(stored[tensor.name])} but the model needs {tensor.size}; take "
                "the model section from the same folder"
            )
        unused.discard(tensor.name)
    if unused:
        raise UserError(f"the weights contain {min(unused)}, which the model does not use; check its model_type")


def load_hf_state(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy a Hugging Face state dict into the decoder's parameters; every tensor must be used and none missing."""
    named = {full: state[found] for full, found in full_hf_names(decoder.shape, state).items()}
    parameters = dict(decoder.named_parameters())
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    require_hf_tensors(decoder.shape, sizes, {name: tensor.shape for name, tensor in named.items()})
    for name, parameter in parameters.items():
        place = hf_place(decoder.shape, name)
        with torch.no_grad():
            parameter.copy_(place.read(named[place.name], parameter.shape, slice(None)))


def to_hf_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's parameters under Hugging Face names; a tied head appears once, as the embedding."""
    parameters = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    return {
        tensor.name: tensor.make(lambda name, window: parameters[name][window], slice(None)).contiguous()
        for tensor in hf_tensors(decoder.shape, sizes)
    }
