"""From rows of metrics to curves: one value per step, smoothing, and few enough points to draw."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

Point = tuple[float, float | None]
"""A step and its value; None is a gap."""

_BUCKETS = 500
_SMOOTHING_SHARE = 0.01
_SMALLEST_TO_SMOOTH = 20


def curve(rows: Iterable[dict[str, Any]], field: str, scale: float = 1.0) -> list[Point]:
    """One field over steps: if a restart repeated a step, the later row counts; non-finite values are gaps."""
    by_step: dict[float, float | None] = {}
    for row in rows:
        value = row.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and "step" in row:
            by_step[row["step"]] = value * scale if math.isfinite(value) else None
    return sorted(by_step.items())


def smooth(points: Sequence[Point]) -> list[Point]:
    """A mean over the neighbours on both sides, 1% of the curve each, fewer at its ends so that it never lags.

    Empty if there are too few points to smooth.
    """
    if len(points) < _SMALLEST_TO_SMOOTH:
        return []
    sums, counts = [0.0], [0]
    for _, value in points:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    widest = max(2, round(_SMOOTHING_SHARE * len(points)))
    smoothed: list[Point] = []
    for index, (step, value) in enumerate(points):
        reach = min(widest, index, len(points) - 1 - index)
        low, high = index - reach, index + reach + 1
        mean = None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low])
        smoothed.append((step, mean))
    return smoothed


def thin(points: Sequence[Point]) -> list[Point]:
    """At most two points per bucket, the lowest and the highest, so that no spike is lost in a long run."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    thinned: list[Point] = []
    for bucket in range(_BUCKETS):
        inside = points[bucket * len(points) // _BUCKETS : (bucket + 1) * len(points) // _BUCKETS]
        values = [(value, step) for step, value in inside if value is not None]
        if not values:
            thinned.append((inside[0][0], None))
            continue
        ends = {min(values), max(values)}
        thinned.extend((step, value) for value, step in sorted(ends, key=lambda pair: pair[1]))
    return thinned


def finite(points: Sequence[Point]) -> list[float]:
    """The values of a curve without its gaps."""
    return [value for _, value in points if value is not None]
