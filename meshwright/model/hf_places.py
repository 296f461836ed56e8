"""Where Hugging Face states keep each of our parameters: names by family, and rows of experts or of fused tensors."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model.hf_llava import LANGUAGE, encoder_tensor

Size = Sequence[int]
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
    "moe.router.linear": "model.layers.{}.mlp.gate",
    "shared.gate": "model.layers.{}.mlp.shared_experts.gate_proj",
    "shared.up": "model.layers.{}.mlp.shared_experts.up_proj",
    "shared.down": "model.layers.{}.mlp.shared_experts.down_proj",
    "hidden_norm": "model.layers.{}.hnorm",
    "embedding_norm": "model.layers.{}.enorm",
    "joined": "model.layers.{}.eh_proj",
    "output_norm": "model.layers.{}.shared_head.norm",
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
_LATENT_NAMES = {
    "attention.q_down": "model.layers.{}.self_attn.q_a_proj",
    "attention.q_down_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_b_proj",
    "attention.kv_down": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "attention.k_rope": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "attention.kv_down_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "attention.kv": "model.layers.{}.self_attn.kv_b_proj",
}
_ROUTERS = {"mixtral": "model.layers.{}.block_sparse_moe.gate", "gpt_oss": "model.layers.{}.mlp.router"}
"""Routers that are called otherwise than in most families."""
_WITHOUT_KIND = {
    "attention.sinks.weight": "model.layers.{}.self_attn.sinks",
    "moe.router.preference": "model.layers.{}.mlp.gate.e_score_correction_bias",
}
_EXPERTS = "model.layers.{}.mlp.experts"
_EACH_EXPERT = {
    "moe.experts.gate_up": ("model.layers.{}.mlp.experts.{}.gate_proj", "model.layers.{}.mlp.experts.{}.up_proj"),
    "moe.experts.down": ("model.layers.{}.mlp.experts.{}.down_proj",),
}
_EACH_MIXTRAL_EXPERT = {
    "moe.experts.gate_up": (
        "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "model.layers.{}.block_sparse_moe.experts.{}.w3",
    ),
    "moe.experts.down": ("model.layers.{}.block_sparse_moe.experts.{}.w2",),
}


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one of our parameters and where a stored tensor has them."""

    tensor: str
    start: int
    """The first row in our parameter."""
    rows: int
    first: int = 0
    """The first row in the stored tensor, or column if it is transposed."""
    step: int = 1
    """Stored rows from one of ours to the next."""
    expert: int | None = None
    """Which matrix of a stored tensor that has one for every expert."""
    transposed: bool = False

    def read(self, stored: Any, start: int, stop: int) -> Tensor:
        """Rows start to stop of our parameter, all within this span, out of the stored tensor or out of anything that
        is sliced like one."""
        first = self.first + (start - self.start) * self.step
        own = slice(first, first + (stop - start - 1) * self.step + 1)
        within = (slice(None), own) if self.transposed else (own,)
        if self.expert is not None:
            taken: Tensor = stored[(slice(self.expert, self.expert + 1), *within)][0]
        else:
            taken = stored[within]
        return (taken.t() if self.transposed else taken)[:: self.step]


def read_rows(spans: Sequence[Span], rows: slice, size: Size, read: Callable[[Span, int, int], Tensor]) -> list[Tensor]:
    """Some rows of our parameter from the spans that have them, by a function that reads rows of one span."""
    start, stop, _ = rows.indices(size[0])
    found = []
    for span in spans:
        low, high = max(start, span.start), min(stop, span.start + span.rows)
        if low < high:
            found.append(read(span, low, high))
    return found


def spans_of(shape: Model, name: str, size: Size, stored: Container[str] = ()) -> list[Span]:
    """Where our parameter `name` of this size is in a state of this shape's family.

    Experts are tensors of their own, as in published files, unless `stored` contains one for all of them.
    """
    if shape.vision is not None:
        return _spans_of_llava(shape, name, size)
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    if shape.tied and module == "head":
        module = "embed"
    if module in _EACH_EXPERT and shape.experts is not None:
        return _spans_of_experts(shape, module, kind, layer, size, stored)
    if shape.positions == "learned":
        return _spans_of_gpt2(name, module, kind, layer, size)
    if (alone := _WITHOUT_KIND.get(f"{module}.{kind}")) is not None:
        return [Span(alone.format(layer), 0, size[0])]
    stored_as = _stored_module(shape, module, layer, kind, stored)
    if stored_as is None:
        raise _unknown(name)
    first = shape.latent.kv_rank if module == "attention.k_rope" and shape.latent is not None else 0
    return [Span(f"{stored_as}.{kind}", 0, size[0], first)]


def _spans_of_llava(shape: Model, name: str, size: Size) -> list[Span]:
    if not name.startswith("vision."):
        spans = spans_of(shape.decoder, name, size)
        return [replace(span, tensor=f"{LANGUAGE}{span.tensor}") for span in spans]
    if (stored_as := encoder_tensor(name.removeprefix("vision."))) is None:
        raise _unknown(name)
    return [Span(stored_as, 0, size[0])]


def _stored_module(shape: Model, module: str, layer: str, kind: str, stored: Container[str]) -> str | None:
    """What families named after Llama call a module."""
    names = _LLAMA_NAMES
    if shape.latent is not None:
        names = _LLAMA_NAMES | _LATENT_NAMES
        if shape.latent.q_rank is None:
            names["attention.q"] = _LLAMA_NAMES["attention.q"]
    if module not in names:
        return None
    found = names[module].format(layer)
    if module == "moe.router.linear" and f"{found}.{kind}" not in stored:
        found = _ROUTERS.get(_naming(shape), found).format(layer)
    return found


def _naming(shape: Model) -> str:
    """The family that names the experts: how they are balanced makes no difference to it."""
    if shape.sinks:
        return "gpt_oss"
    return "mixtral" if shape.latent is None and not shape.qk_norm else "qwen3_moe"


def _spans_of_gpt2(name: str, module: str, kind: str, layer: str, size: Size) -> list[Span]:
    if module not in _GPT2_NAMES:
        raise _unknown(name)
    first = _GPT2_FUSED.index(module) * size[0] if module in _GPT2_FUSED else 0
    transposed = module in _GPT2_TRANSPOSED and kind == "weight"
    return [Span(f"{_GPT2_NAMES[module].format(layer)}.{kind}", 0, size[0], first, transposed=transposed)]


def _spans_of_experts(
    shape: Model, module: str, kind: str, layer: str, size: Size, stored: Container[str]
) -> list[Span]:
    assert shape.experts is not None
    experts, family = range(shape.experts.count), _naming(shape)
    rows = size[0] // shape.experts.count
    fused = f"{_EXPERTS.format(layer)}.{'gate_up_proj' if module.endswith('gate_up') else 'down_proj'}"
    if family == "gpt_oss":
        return _spans_of_gpt_oss(fused, kind, experts, rows)
    if fused in stored:
        return [Span(fused, expert * rows, rows, expert=expert) for expert in experts]
    each = (_EACH_MIXTRAL_EXPERT if family == "mixtral" else _EACH_EXPERT)[module]
    part = rows // len(each)
    return [
        Span(f"{tensor.format(layer, expert)}.{kind}", expert * rows + place * part, part)
        for expert in experts
        for place, tensor in enumerate(each)
    ]


def _spans_of_gpt_oss(fused: str, kind: str, experts: range, rows: int) -> list[Span]:
    """One tensor for all experts, each one's matrix transposed, gate and up alternating."""
    tensor = fused if kind == "weight" else f"{fused}_bias"
    step = 2 if fused.endswith("gate_up_proj") else 1
    return [
        Span(tensor, expert * rows + place * rows // step, rows // step, place, step, expert, kind == "weight")
        for expert in experts
        for place in range(step)
    ]


def _unknown(name: str) -> UserError:
    return UserError(
        f"parameter {name} does not exist in a Hugging Face model of this kind; export only shapes that it supports"
    )
