"""Recomputation without devices: what a block keeps in each mode, and the table of operations to keep.

none       every tensor the backward needs is kept
selective  results of the operations in KEPT_OPERATIONS are kept, everything else is recomputed from them
full       only the block's input is kept, and its forward runs again in the backward
segment    as full, for the first of several blocks that are recomputed together
joined     nothing is kept: recomputed together with the block before
A recomputed forward stops as soon as everything missing is there: a block's last projection is recomputed, or kept,
only where dropout follows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from meshwright.cost.cost import Cost

Mode = Literal["none", "selective", "full", "segment", "joined"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
"""What a block may do whatever its neighbours do."""
REPEATED: tuple[Mode, ...] = ("full", "segment", "joined")
"""Modes in which a block's whole forward runs again."""

PROJECTIONS = {
    "aten.mm": "a projection",
    "aten.addmm": "a projection with bias",
    "aten._scaled_mm": "a projection in fp8",
    "meshwright.scaled_product": "a projection in fp8 with scales of rows or blocks",
    "meshwright.adapted": "projections of one input with their adapters, compiled",
}
KEPT_OPERATIONS = {
    **PROJECTIONS,
    "aten._grouped_mm": "the experts' projections on CUDA, 16-bit",
    "aten._scaled_dot_product_flash_attention_for_cpu": "attention on a CPU",
    "aten._scaled_dot_product_flash_attention": "attention on CUDA, 16-bit",
    "aten._scaled_dot_product_cudnn_attention": "attention on CUDA, 16-bit, where cuDNN is preferred",
    "aten._scaled_dot_product_efficient_attention": "attention on CUDA, fp32 or with a mask",
    "torch_attn._varlen_attn": "attention within documents or a window on CUDA, 16-bit",
    "aten._flash_attention_forward": "attention with sinks on CUDA, 16-bit",
    "meshwright.shared_attention": "attention over a sequence that ranks share by ring or all-gather",
}
"""What selective recomputation keeps: results that take many FLOPs per byte. Norms, rotations, activation functions,
products of gate and up, dropout masks, copies and collectives are recomputed. Change it before a model is built."""

SELECTIVE_TENSORS = (
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.out",
    "attention.lse",
    "ffn.up",
    "ffn.gate",
    "shared.up",
    "shared.gate",
    "moe.gate_up",
    "moe.out",
)
"""Saved tensors of a block as large as what selective recomputation keeps for them."""


def segments_of(modes: Sequence[str]) -> list[range]:
    """The places of blocks that are recomputed together, by the mode of each of a stage; the others alone."""
    starts = [place for place, mode in enumerate(modes) if mode != "joined"]
    return [range(start, end) for start, end in pairwise([*starts, len(modes)])]


def under(mode: Mode, whole: Cost, stream_bytes: int, spared_flops: int, projected: Mapping[str, int]) -> Cost:
    """A block's cost in a mode, from that without recomputation; recomputed forward work is part of the backward.

    `stream_bytes` are the residual stream's; `spared_flops` the last projection's, 0 where something after it is saved;
    `projected` the results of products that selective recomputation keeps instead of, or beside, tensors of `whole`.
    """
    if mode == "none":
        return whole
    if mode != "selective":
        backward = whole.backward_flops + whole.forward_flops - spared_flops
        return replace(whole, backward_flops=backward, saved_bytes={} if mode == "joined" else {"input": stream_bytes})
    kept = {name: whole.saved_bytes[name] for name in SELECTIVE_TENSORS if name in whole.saved_bytes}
    kept |= {"input": stream_bytes, "attention.projected": stream_bytes, **projected}
    return replace(whole, saved_bytes={name: size for name, size in kept.items() if size})


def remade_bytes(none: Mapping[str, int], kept: Mapping[str, int]) -> int:
    """Bytes of saved tensors that a recomputation restores at once, besides what was kept (at most: q and k may be
    kept as they are, where nothing turns them)."""
    shared = {"input": "attention_norm.input"} | {name: name for name in kept if name in none}
    as_they_were = {shared[name] for name in kept if name in shared} - {"attention.q", "attention.k"}
    return sum(size for name, size in none.items() if name not in as_they_were)
