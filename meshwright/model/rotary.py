"""Rotary positions: pairs (i, i + E/2) of every head rotate by position × frequency.

Frequencies and tables are computed in float64 where they are used: no buffer that a cast or `to_empty` could spoil.
B batch, S sequence, H heads, E head_dim.
"""

import math

import torch
from torch import Tensor

from meshwright.job import Model
from meshwright.model.numbers import wide_dtype

RotaryTables = tuple[Tensor, Tensor]


def inverse_frequencies(shape: Model, device: torch.device) -> Tensor:
    """Radians per position of each of the E/2 pairs, in float64, with Llama 3.1's scaling where the shape has it."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    # Slow rotations are stretched by the factor, fast ones kept, those between blended linearly in turns per context.
    turns = scaling.original_max_sequence_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary_tables(shape: Model, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
    """(cos, sin) of positions' shape + (1, E/2): float64 for activations in float64, else float32."""
    angles = positions.to(torch.float64).unsqueeze(-1) * inverse_frequencies(shape, positions.device)
    wide = wide_dtype(dtype)
    return angles.cos().to(wide).unsqueeze(-2), angles.sin().to(wide).unsqueeze(-2)


def apply_rotary(x_BSHE: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate every head by its position, computed in the tables' dtype and returned in x's."""
    cos, sin = tables
    low, high = x_BSHE.to(cos.dtype).chunk(2, dim=-1)
    turned = (low * cos).sub_(high * sin), (high * cos).add_(low * sin)
    return torch.cat(turned, dim=-1).to(x_BSHE.dtype)
