"""The schema of the rows of a run's files: the fields that readers count, compare or draw, and their types."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.reading.rows import Kind, Row

ATTEMPTS = 10_000
"""More attempts than any run makes; a larger number is not valid."""
_LARGEST_COUNT = 2**53
"""Beyond this, floats skip whole numbers."""
_LARGEST = 1e300
"""Sums and differences of such numbers are floats too."""
REHEARSAL = "rehearsal.json"
"""What a rehearsal found; its presence makes a run folder one of this kind."""
_MOST_FIELDS = 64
_LONGEST_WORD = 200

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """A finite number, small enough to calculate with."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_measured(value: Any) -> bool:
    """A number, one that is not finite, or none."""
    return value is None or is_number(value) or (type(value) is float and not math.isfinite(value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _is_attempt(value: Any) -> bool:
    return type(value) is int and 0 <= value < ATTEMPTS


def _is_word(value: Any) -> bool:
    return type(value) is str and len(value) <= _LONGEST_WORD


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str


_METRICS: Mapping[str, Check] = {
    "step": _is_count,
    "attempt": _is_attempt,
    **dict.fromkeys(("loss", "val_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu"), _is_measured),
    **dict.fromkeys(("memory_bytes", "data_wait_s", "step_s"), _is_measured),
}
_EVENTS: Mapping[str, Check] = {
    "kind": _is_word,
    "attempt": _is_attempt,
    "elapsed_s": is_number,
    **dict.fromkeys(("step", "position", "ranks"), _or_none(_is_count)),
    **dict.fromkeys(("time", "reason", "error", "signal", "device", "flops_convention"), _is_text),
    **dict.fromkeys(("parameters", "flops_per_token", "gpu_peak_flops"), _or_none(is_number)),
    **dict.fromkeys(("peak_memory_bytes", "steady_memory_bytes"), _or_none(_is_count)),
}
_MEMORY: Mapping[str, Check] = {
    **dict.fromkeys(("step", "rank", "host_bytes"), _is_count),
    "at": _is_word,
    "layer": _or_none(_is_word),
    "micro_batch": _or_none(_is_count),
    **{f"{kind}_bytes": _or_none(_is_count) for kind in ("parameters", "gradients", "optimizer")},
    **{f"{kind}_bytes": _or_none(_is_count) for kind in ("activations", "other")},
}


def _fault(row: Row, checks: Mapping[str, Check], needed: tuple[str, ...]) -> str | None:
    if len(row) > _MOST_FIELDS:
        return f"it has more than {_MOST_FIELDS} fields"
    for name in needed:
        if name not in row:
            return f"it has no {name}"
    for name, value in row.items():
        check = checks.get(name)
        if check is not None and not check(value):
            return f"its {name} has the wrong type or is too large"
    return None


def _metric_fault(row: Row) -> str | None:
    """The same as `_fault`, fast for rows of plain numbers: a long run has millions."""
    for value in row.values():
        kind = type(value)
        if (kind is float and (-_LARGEST < value < _LARGEST)) or kind is int or value is None:
            continue
        return _fault(row, _METRICS, ("step",))
    if len(row) <= _MOST_FIELDS and _is_count(row.get("step")) and _is_attempt(row.get("attempt", 0)):
        return None
    return _fault(row, _METRICS, ("step",))


METRICS = Kind("metrics.jsonl", _metric_fault)
EVENTS = Kind("events.jsonl", lambda row: _fault(row, _EVENTS, ("kind",)))
MEMORY = Kind("memory.jsonl", lambda row: _fault(row, _MEMORY, tuple(_MEMORY)))
