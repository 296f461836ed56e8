"""Hugging Face state dicts of Llama, Mistral, Qwen2, Qwen3 and GPT-2, to and from our parameters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.job.model import Model
from meshwright.model.decoder import Decoder

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

# Constants that older files carry beside the weights: attention masks and rotary frequencies.
_NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class HfPlace:
    """Where one of our parameters lies in a Hugging Face state: a tensor, perhaps transposed, or a third of it."""

    name: str
    transposed: bool = False
    third: int | None = None

    def read(self, tensor: Tensor) -> Tensor:
        """Our parameter out of the stored tensor."""
        straight = tensor.t() if self.transposed and tensor.dim() == 2 else tensor
        return straight if self.third is None else straight.chunk(3)[self.third]


def hf_place(shape: Model, name: str) -> HfPlace:
    """Where our parameter `name` lies in the state of this shape's Hugging Face family."""
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    if shape.tied and module == "head":
        module = "embed"
    names = _GPT2_NAMES if shape.positions == "learned" else _LLAMA_NAMES
    if module not in names:
        raise UserError(
            f"parameter {name} has no place in a Hugging Face model of this kind; export only shapes that one has"
        )
    stored = f"{names[module].format(layer)}.{kind}"
    if names is _LLAMA_NAMES:
        return HfPlace(stored)
    third = _GPT2_FUSED.index(module) if module in _GPT2_FUSED else None
    return HfPlace(stored, module in _GPT2_TRANSPOSED and kind == "weight", third)


def load_hf_state(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy a Hugging Face state dict into the decoder's parameters; every tensor must be used and none missing."""
    # GPT-2's published files leave out the prefix that transformers itself writes.
    bare = decoder.shape.positions == "learned" and "wte.weight" in state
    named = {(f"transformer.{key}" if bare else key): value for key, value in state.items()}
    unused = {key for key in named if not _NOT_WEIGHTS.search(key)}
    if decoder.shape.tied:
        unused.discard("lm_head.weight")
    for name, parameter in decoder.named_parameters():
        place = hf_place(decoder.shape, name)
        if place.name not in named:
            raise UserError(f"the weights lack {place.name}, which {name} comes from; give the folder of a whole model")
        value = place.read(named[place.name])
        if value.shape != parameter.shape:
            raise UserError(
                f"{place.name} gives {name} the shape {tuple(value.shape)}, the model has {tuple(parameter.shape)}; "
                "take the model section from the same folder"
            )
        with torch.no_grad():
            parameter.copy_(value)
        unused.discard(place.name)
    if unused:
        raise UserError(f"the weights hold {sorted(unused)[0]}, which the model has no use for; check its model_type")


def to_hf_state(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's parameters under Hugging Face names; a tied head appears once, as the embedding."""
    parts: dict[HfPlace, Tensor] = {
        hf_place(decoder.shape, name): parameter.detach() for name, parameter in decoder.named_parameters()
    }
    state: dict[str, Tensor] = {}
    for place, tensor in parts.items():
        if place.third is None:
            state[place.name] = tensor.t().contiguous() if place.transposed else tensor
        elif place.third == 0:
            thirds = [parts[HfPlace(place.name, place.transposed, third)] for third in range(3)]
            state[place.name] = torch.cat([t.t() if place.transposed else t for t in thirds], dim=-1)
    return state
