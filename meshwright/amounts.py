"""Numbers as people write them: tokens read from 15T, 2e12 or 1.4M, sizes written as 41.2 GiB."""

import re
from decimal import Decimal
from typing import Any

_AMOUNT = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?(?:e\+?\d{1,2})?) ?([kmbgt]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_LONGEST = 40
_HOW = "write a whole number as 15T, 2e12 or 1400000"


class NoAmount(ValueError):
    """What was given is not a number of the kind needed; its text says what to write."""


def amount(given: Any) -> float:
    """A number of 0 or more, or the one that a text stands for."""
    return float(_parsed(given)[0])


def tokens(given: Any) -> int:
    """A whole number of tokens, or the one that a text or a float stands for."""
    return _whole(_parsed(given)[0])


def length(given: Any) -> int:
    """Tokens of a sequence, for which k and M are ambiguous: people call 8192 tokens 8k."""
    value, unit = _parsed(given)
    if unit:
        raise NoAmount(f"write out a length: {unit} may be {_UNITS[unit.lower()]:,} or a power of two")
    return _whole(value)


def size(bytes_: float) -> str:
    """Bytes as people write them: 512 B, 1.5 MiB, 41.2 GiB."""
    unit, name = size_unit(bytes_)
    value = bytes_ / unit
    return f"{value:.3g} {name}" if value < 999.5 else f"{value:.0f} {name}"


def size_unit(largest_bytes: float) -> tuple[int, str]:
    """A readable unit for numbers up to this size."""
    power = 3 if largest_bytes >= 2**30 else 2 if largest_bytes >= 2**20 else 1 if largest_bytes >= 2**10 else 0
    return 2 ** (10 * power), ("B", "KiB", "MiB", "GiB")[power]


def _whole(value: Decimal) -> int:
    if value != value.to_integral_value():
        raise NoAmount(_HOW)
    return int(value)


def _parsed(given: Any) -> tuple[Decimal, str]:
    """The number, and the unit it was written with."""
    if isinstance(given, int) and not isinstance(given, bool):
        return Decimal(given), ""
    text = given.strip() if isinstance(given, str) else str(given)
    found = None if len(text) > _LONGEST else _AMOUNT.fullmatch(text)
    if found is None:
        raise NoAmount(_HOW)
    return Decimal(found[1]) * _UNITS[found[2].lower()], found[2]
