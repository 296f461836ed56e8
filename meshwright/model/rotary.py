"""Rotary positions: pairs (i, i + E/2) of every head rotate by position × frequency.

Frequencies and tables are computed in float64 where they are used: no buffer that a cast or `to_empty` could spoil.
B batch, S sequence, H heads, E head_dim.
"""

import math

import torch
from torch import Tensor

from meshwright.job import Model, RopeScaling
from meshwright.model.numbers import wide_dtype

RotaryTables = tuple[Tensor, Tensor]


def inverse_frequencies(shape: Model, device: torch.device) -> Tensor:
    """Radians per position of each of the E/2 pairs, in float64, with the shape's scaling."""
    exponents = torch.arange(0, shape.rope_dim, 2, dtype=torch.float64, device=device) / shape.rope_dim
    frequencies = shape.rope_theta**-exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "yarn":
        keep = _kept_by_yarn(shape, scaling, device)
    else:
        # Slow rotations are stretched by the factor, fast ones kept, those between blended linearly in turns per
        # context.
        turns = scaling.original_max_sequence_length * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _kept_by_yarn(shape: Model, scaling: RopeScaling, device: torch.device) -> Tensor:
    """How much of each pair's frequency stays (arXiv:2309.00071): blended linearly over the pairs' numbers between
    those that turn beta_fast and beta_slow times in the original context."""

    def pair(turns: float) -> float:
        context = scaling.original_max_sequence_length / (2 * math.pi * turns)
        return shape.rope_dim * math.log(context) / (2 * math.log(shape.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.rope_dim - 1)
    span = last - first or 0.001
    numbers = torch.arange(shape.rope_dim // 2, dtype=torch.float64, device=device)
    return 1 - ((numbers - first) / span).clamp(0.0, 1.0)


def _magnitude(scaling: RopeScaling, mscale: float) -> float:
    return 1.0 if scaling.factor <= 1 else 1.0 + 0.1 * mscale * math.log(scaling.factor)


def rotated_scale(shape: Model) -> float:
    """What rotated queries and keys are multiplied by: YaRN makes them longer for longer contexts."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling, scaling.mscale) / _magnitude(scaling, scaling.mscale_all_dim)
    return _magnitude(scaling, 1.0)


def score_scale(shape: Model) -> float:
    """What attention scores are multiplied by besides head_dim^-1/2: DeepSeek's YaRN scales all of a head."""
    scaling = shape.rope_scaling
    if shape.latent is None or scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _magnitude(scaling, scaling.mscale_all_dim) ** 2


def rotary_tables(shape: Model, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
    """(cos, sin) of positions' shape + (1, E/2), scaled: float64 for activations in float64, else float32."""
    angles = positions.to(torch.float64).unsqueeze(-1) * inverse_frequencies(shape, positions.device)
    wide, scale = wide_dtype(dtype), rotated_scale(shape)
    return (angles.cos() * scale).to(wide).unsqueeze(-2), (angles.sin() * scale).to(wide).unsqueeze(-2)


def apply_rotary(x_BSHE: Tensor, tables: RotaryTables, *, interleaved: bool = False) -> Tensor:
    """Rotate every head by its position, computed in the tables' dtype and returned in x's.

    Interleaved pairs are (2i, 2i + 1) before and (i, i + E/2) after: products of two such heads are the same.
    """
    cos, sin = tables
    wide = x_BSHE.to(cos.dtype)
    low, high = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (low * cos).sub_(high * sin), (high * cos).add_(low * sin)
    return torch.cat(turned, dim=-1).to(x_BSHE.dtype)
