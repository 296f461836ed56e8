"""The shapes a calibration measures: those of decoders from 0.1B to 70B and of their shards under tensor parallelism,
coarse ones first, so that a device that runs out of time has measured some of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from meshwright.hardware.profile import Attention, OperationName, ProductKind

_MOST_FLOPS = 15e12
"""Limit on one product: about 20 ms on the fastest GPUs of 2026."""
_EVERY = {"bf16": 2, "fp16": 2, "fp8": 2, "tf32": 3, "fp32": 3}
"""The first format gets every number of tokens; of the others narrow ones every second, wide ones every third."""
_WIDE_PROJECTIONS = 5
"""Projections that all formats but the main one and fp8 are measured with."""
_WIDE_SHARE = 0.05
"""Fraction of the largest product's FLOPs for fp32 without tensor cores."""

_NARROW_PROJECTIONS = (
    (64, 64, 64),
    (1024, 64, 64),
    (1024, 192, 64),
    (1024, 64, 192),
    (1024, 128, 128),
    (1024, 384, 128),
    (1024, 128, 384),
    (1024, 256, 256),
    (256, 1024, 256),
    (256, 256, 1024),
    (4096, 64, 64),
    (256, 768, 768),
    (256, 3072, 768),
)
"""Tokens, outputs and inputs of projections in narrow formats."""
_NARROW_HEADS = 3
_NARROW_ATTENTIONS = 8
_NARROW_LOSSES = 3
_LAYERS = (2, 6)
"""Of small decoders, so that a block's share can be told from that of the ends."""

DecoderModel = dict[str, int | str | bool]
DecoderShape = tuple[DecoderModel, str, int | None]
"""A decoder, its recomputation and its layout.zero over all ranks, None for one on each of them alone."""
Size = tuple[str, ProductKind, int, int, int]


@dataclass(frozen=True)
class AttentionShape:
    """One attention call to measure."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence: int

    @property
    def flops(self) -> float:
        """Of the causal half of its forward."""
        return 2.0 * self.batch * self.heads * self.sequence**2 * self.head_dim

    def measured(self, kernel: str, forward_s: float, backward_s: float) -> Attention:
        """Its row in the profile."""
        return Attention.model_validate(
            {**self.__dict__, "kernel": kernel, "forward_s": forward_s, "backward_s": backward_s}
        )


@dataclass(frozen=True)
class Shapes:
    """What is measured."""

    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    """Rows of projections."""
    projections: tuple[tuple[int, int], ...]
    """Outputs and inputs of projections."""
    heads: tuple[tuple[int, int, int], ...]
    """Tokens per chunk, vocabulary and width of losses."""
    attentions: tuple[AttentionShape, ...]
    losses: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]
    updates: tuple[int, ...]
    operations: tuple[tuple[OperationName, int, int], ...] = ()
    """Names, rows and widths."""
    decoders: tuple[tuple[DecoderModel, str], ...] = ()
    """Small decoders, but for their layers, and their recomputation."""
    shared: tuple[DecoderModel, ...] = ()
    """Those that several ranks measure with every layout.zero."""
    narrow: tuple[str, ...] = ()
    """Further formats of a CPU, measured with fewer shapes, small ones first: it may have to emulate them."""

    def products(self) -> Iterator[Size]:
        """Every product; the middle numbers of tokens first, then the ends, and the heads between."""
        middle = sorted(self.tokens, key=lambda size: abs(self.tokens.index(size) - len(self.tokens) // 2))
        for sizes in self.heads:
            yield from _of_head(self.dtypes[0], *sizes)
        for place, tokens in enumerate(middle):
            for dtype in self.dtypes:
                if place % (_EVERY[dtype] if dtype != self.dtypes[0] else 1) == 0:
                    few = dtype not in ("fp8", self.dtypes[0])
                    most = _MOST_FLOPS * (_WIDE_SHARE if dtype == "fp32" else 1.0)
                    for outputs, inputs in self.projections[: _WIDE_PROJECTIONS if few else None]:
                        if 2.0 * tokens * outputs * inputs <= most:
                            yield from _of_projection(dtype, tokens, outputs, inputs)

    def narrow_products(self) -> Iterator[Size]:
        """Those in narrow formats."""
        for sizes in _NARROW_PROJECTIONS:
            for dtype in self.narrow:
                yield from _of_projection(dtype, *sizes)
        for sizes in sorted(self.heads, key=prod)[:_NARROW_HEADS]:
            for dtype in self.narrow:
                yield from _of_head(dtype, *sizes)

    def narrow_attentions(self) -> Iterator[AttentionShape]:
        """The small ones in narrow formats."""
        for one in sorted(self.attentions, key=lambda one: one.flops)[:_NARROW_ATTENTIONS]:
            for dtype in self.narrow:
                yield replace(one, dtype=dtype)

    def narrow_losses(self) -> Iterator[tuple[str, int, int]]:
        """Formats, rows and vocabularies."""
        for rows, vocabulary in self.losses[:_NARROW_LOSSES]:
            for dtype in self.narrow:
                yield dtype, rows, vocabulary

    def decoder_groups(self, ranks: int) -> Iterator[list[DecoderShape]]:
        """Decoders whose differences count: they are measured in turn."""
        shared = self.shared if ranks > 1 else ()
        for model in shared:
            yield [({**model, "layers": count}, "none", zero) for zero in (None, 0, 1, 2, 3) for count in _LAYERS]
        for model, recompute in self.decoders:
            if recompute != "none" or model not in shared:
                yield [({**model, "layers": count}, recompute, None) for count in _LAYERS]


def _of_projection(dtype: str, tokens: int, outputs: int, inputs: int) -> Iterator[Size]:
    yield dtype, "forward", tokens, outputs, inputs
    yield dtype, "input", tokens, inputs, outputs
    yield dtype, "weight", outputs, inputs, tokens


def _of_head(dtype: str, rows: int, vocabulary: int, width: int) -> Iterator[Size]:
    yield dtype, "forward", rows, vocabulary, width
    yield dtype, "input", rows, width, vocabulary
    yield dtype, "weight sum", vocabulary, width, rows


def shapes_for(device: torch.device) -> Shapes:
    """The shapes for a GPU or a CPU."""
    return _GPU if device.type == "cuda" else _CPU


def _projections(width: int, inner: int, kv: int) -> list[tuple[int, int]]:
    """Of one decoder: fused q, k and v, the output, fused gate and up, down, and q and up alone."""
    return [(width + 2 * kv, width), (width, width), (2 * inner, width), (width, inner), (inner, width)]


def _attentions(
    dtype: str, tokens: int, head_dims: tuple[int, ...], sequences: tuple[int, ...]
) -> list[AttentionShape]:
    return [
        AttentionShape(dtype, tokens // sequence, 2048 // head_dim, 2048 // head_dim // groups, head_dim, sequence)
        for sequence in sequences
        for head_dim in head_dims
        for groups in (4, 1)
        if tokens >= sequence
    ]


_GPU = Shapes(
    dtypes=("bf16", "fp8", "tf32", "fp32"),
    tokens=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    projections=tuple(
        dict.fromkeys(
            [
                *_projections(2048, 8192, 512),
                *_projections(4096, 14336, 1024),
                *_projections(768, 3072, 768),
                *_projections(1024, 4096, 1024),
                *_projections(8192, 28672, 1024),
                *_projections(3072, 8192, 1024),
                # of eight and of two tensor-parallel ranks
                (1280, 8192),
                (8192, 1024),
                (7168, 8192),
                (8192, 3584),
                (2048, 4096),
                (4096, 7168),
            ]
        )
    ),
    heads=(
        (2048, 128256, 2048),
        (2048, 128256, 4096),
        (2048, 128256, 768),
        (8192, 32000, 4096),
        (8192, 32000, 2048),
        (8192, 32000, 1024),
        (5376, 50304, 768),
    ),
    attentions=(
        *_attentions("bf16", 16384, (128, 64), (4096, 16384, 1024, 2048, 8192)),
        *_attentions("bf16", 4096, (128, 64), (4096, 2048, 1024)),
        *_attentions("bf16", 32768, (128, 64), (4096, 32768)),
    ),
    losses=((2048, 128256), (8192, 32000)),
    copies=(2**30, 2**28, 2**26, 2**24, 2**22, 2**20),
    updates=(256 * 2**20, 32 * 2**20),
)
_LLAMA: DecoderModel = {"vocab_size": 256, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64}
_GPT2: DecoderModel = {
    "vocab_size": 256, "width": 32, "heads": 2, "ffn_width": 128, "norm": "layernorm", "activation": "gelu",
    "positions": "learned", "qkv_bias": True, "linear_bias": True, "tied": True,
}  # fmt: skip
_WIDE_LLAMA = _LLAMA | {"width": 256, "heads": 4, "kv_heads": 2, "ffn_width": 704}
"""One whose parameters take longer to transfer than its calls."""
# Rows and widths: the first three of each are no line, so that rows can be told from width, and take little time.
_STREAMS = ((512, 256), (4096, 64), (64, 64), (4096, 1024), (64, 1024), (1024, 768), (512, 1024), (4096, 256))
_INNER = ((512, 1024), (4096, 256), (64, 128), (4096, 3072), (64, 4096))
_ROTATED = ((8192, 64), (16384, 16), (256, 16), (49152, 64), (2048, 128), (4096, 32), (512, 64))
_MATRICES = ((4096, 768), (512, 64), (8192, 256), (32768, 768))
_OPERATIONS: tuple[tuple[tuple[OperationName, ...], tuple[tuple[int, int], ...]], ...] = (
    (("rmsnorm", "layernorm", "sum", "bias"), _STREAMS),
    (("dropout", "scale", "embedding"), _STREAMS[:6]),
    (("swiglu", "gelu"), _INNER),
    (("rotary",), _ROTATED),
    (("rmsnorm",), ((8192, 64), (49152, 64))),
    (("fill", "scale", "sum"), _MATRICES),
)
_CPU = Shapes(
    dtypes=("fp32",),
    narrow=("bf16", "fp16"),
    tokens=(64, 256, 1024, 4096),
    projections=tuple(
        dict.fromkeys([*_projections(256, 768, 128), *_projections(64, 192, 32), *_projections(768, 3072, 256)])
    ),
    heads=((256, 2048, 128), (512, 8192, 256), (256, 50304, 768), (2048, 512, 64)),
    attentions=tuple(
        AttentionShape("fp32", batch, heads, heads // groups, head_dim, sequence)
        for batch, heads, head_dim, sequence in (
            (4, 4, 32, 128),
            (4, 8, 64, 256),
            (8, 4, 16, 64),
            (32, 4, 16, 128),
            (1, 12, 64, 1024),
            (4, 12, 64, 512),
            (4, 12, 64, 1024),
        )
        for groups in (2, 1)
    ),
    losses=((256, 2048), (512, 8192), (2048, 512), (128, 50257)),
    copies=(2**26, 2**22, 2**18),
    updates=(2**24, 2**22, 2**18, 256),
    # Coarse ones of every kind first.
    operations=tuple(
        (name, *sizes[place])
        for place in range(8)
        for names, sizes in _OPERATIONS
        if place < len(sizes)
        for name in names
    ),
    decoders=tuple((model, recompute) for model in (_LLAMA, _GPT2) for recompute in ("none", "full", "selective")),
    shared=(_LLAMA, _WIDE_LLAMA),
)
