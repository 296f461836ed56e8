"""A stable 64-bit integer hash, in plain and in numpy integers: the one source of chance in the data."""

import numpy as np
from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(value: int, key: int = 0) -> int:
    """Scatter an integer over 64 bits; another key gives an unrelated scattering."""
    x = (value * _STEP + (key & MASK_64) * _SECOND + _STEP) & MASK_64
    x = ((x ^ (x >> 30)) * _FIRST) & MASK_64
    x = ((x ^ (x >> 27)) * _SECOND) & MASK_64
    return x ^ (x >> 31)


def mix_array(values: NDArray[np.int64], key: int = 0) -> NDArray[np.uint64]:
    """The same as `mix` for every entry of an array."""
    offset = np.uint64(((key & MASK_64) * _SECOND + _STEP) & MASK_64)
    x = values.astype(np.uint64) * np.uint64(_STEP) + offset
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def fraction_of(value: int, key: int) -> float:
    """A stable number in [0, 1) for this value under this key."""
    return (mix(value, key) >> 11) / (1 << 53)
