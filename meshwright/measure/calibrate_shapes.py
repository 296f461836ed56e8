"""The shapes a calibration measures: those of decoders from 0.1B to 70B and of their shards under tensor parallelism,
coarse ones first, so that a device that runs out of time has measured some of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from meshwright.hardware.profile import Attention, OperationName, ProductKind
from meshwright.model.numbers import DTYPES
from meshwright.torch_private.arithmetic import cpu_multiplies

_MOST_FLOPS = 15e12
"""Limit on one product: about 20 ms on the fastest GPUs of 2026."""
_EVERY = {"bf16": 2, "fp16": 2, "fp8": 2, "tf32": 3, "fp32": 3}
"""The first format gets every number of tokens; of the others narrow ones every second, wide ones every third."""
_WIDE_PROJECTIONS = 5
"""Projections that all formats but the main one and fp8 are measured with."""
_WIDE_SHARE = 0.05
"""Fraction of the largest product's FLOPs for fp32 without tensor cores."""

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
    decoders: tuple[tuple[dict[str, int | str | bool], str], ...] = ()
    """Shapes of small decoders and their recomputation."""
    emulated: tuple[str, ...] = ()
    """Formats that a CPU lacks, measured with a few small products."""
    sharded: tuple[tuple[dict[str, int | str | bool], int], ...] = ()
    """Shapes of small decoders and layout.zero over all ranks."""

    def products(self) -> Iterator[Size]:
        """Every product; the middle numbers of tokens first, then the ends, and the heads between."""
        middle = sorted(self.tokens, key=lambda size: abs(self.tokens.index(size) - len(self.tokens) // 2))
        yield from self._heads()
        for dtype in self.emulated:
            yield from _of_projection(dtype, 64, 64, 64)
            yield from _of_projection(dtype, 64, 192, 64)
        for place, tokens in enumerate(middle):
            for dtype in self.dtypes:
                if place % (_EVERY[dtype] if dtype != self.dtypes[0] else 1) == 0:
                    few = dtype not in ("fp8", self.dtypes[0])
                    most = _MOST_FLOPS * (_WIDE_SHARE if dtype == "fp32" else 1.0)
                    for outputs, inputs in self.projections[: _WIDE_PROJECTIONS if few else None]:
                        if 2.0 * tokens * outputs * inputs <= most:
                            yield from _of_projection(dtype, tokens, outputs, inputs)

    def _heads(self) -> Iterator[Size]:
        dtype = self.dtypes[0]
        for rows, vocabulary, width in self.heads:
            yield dtype, "forward", rows, vocabulary, width
            yield dtype, "input", rows, width, vocabulary
            yield dtype, "weight sum", vocabulary, width, rows


def _of_projection(dtype: str, tokens: int, outputs: int, inputs: int) -> Iterator[Size]:
    yield dtype, "forward", tokens, outputs, inputs
    yield dtype, "input", tokens, inputs, outputs
    yield dtype, "weight", outputs, inputs, tokens


def shapes_for(device: torch.device) -> Shapes:
    """The shapes for a GPU or a CPU."""
    if device.type == "cuda":
        return _GPU
    native = tuple(name for name in ("bf16", "fp16") if cpu_multiplies(DTYPES[name]))
    emulated = tuple(name for name in ("bf16", "fp16") if name not in native)
    return replace(_CPU, dtypes=("fp32", *native), emulated=emulated)


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
_LLAMA: dict[str, int | str | bool] = {"vocab_size": 256, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64}
_GPT2: dict[str, int | str | bool] = {
    "vocab_size": 256, "width": 32, "heads": 2, "ffn_width": 128, "norm": "layernorm", "activation": "gelu",
    "positions": "learned", "qkv_bias": True, "linear_bias": True, "tied": True,
}  # fmt: skip
_LAYERS = (2, 6)
"""Of small decoders, so that a block's share can be told from that of the ends."""
_STREAMS = ((512, 256), (4096, 1024), (64, 64), (1024, 768), (512, 1024), (4096, 256), (4096, 64), (64, 1024))
_INNER = ((512, 1024), (4096, 3072), (64, 128), (4096, 256), (64, 4096))
_ROTATED = ((8192, 64), (49152, 64), (256, 16), (4096, 32), (2048, 128), (16384, 16), (512, 64))
_MATRICES = ((4096, 768), (32768, 768), (512, 64), (8192, 256))
_ON_STREAMS: tuple[OperationName, ...] = ("rmsnorm", "layernorm", "sum", "bias")
_SELDOM: tuple[OperationName, ...] = ("dropout", "scale", "embedding")
_CPU = Shapes(
    dtypes=("fp32",),
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
            (1, 12, 64, 1024),
            (8, 4, 16, 64),
            (4, 12, 64, 512),
            (4, 12, 64, 1024),
            (32, 4, 16, 128),
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
        for names, sizes in (
            (_ON_STREAMS, _STREAMS),
            (_SELDOM, _STREAMS[:4]),
            (("swiglu", "gelu"), _INNER),
            (("rotary",), _ROTATED),
            (("rmsnorm",), _ROTATED[:2]),
            (("fill", "scale", "sum"), _MATRICES),
        )
        if place < len(sizes)
        for name in names
    ),
    decoders=tuple(
        ({**model, "layers": layers}, recompute)
        for model in (_LLAMA, _GPT2)
        for recompute in ("none", "full", "selective")
        for layers in _LAYERS
    ),
    sharded=tuple(({**_LLAMA, "layers": layers}, zero) for zero in range(4) for layers in _LAYERS),
)
