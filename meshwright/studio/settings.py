"""The settings in which the jobs of some runs differ."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

MOST_RUNS = 6
"""Columns that a page can show next to each other."""
_MOST_ROWS = 500
_OWN = ("run.folder",)
"""Differs for every run and says nothing about it."""


def differing(jobs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Every setting with different values, one per run; None if a job does not have it, as one of another version."""
    settings = [dict(_flat("", job)) for job in jobs.values()]
    names = [name for name in dict.fromkeys(name for one in settings for name in one) if name not in _OWN]
    rows = [{"setting": name, "values": [one.get(name) for one in settings]} for name in names]
    different = [row for row in rows if len({json.dumps(value) for value in row["values"]}) > 1]
    return {
        "runs": list(jobs),
        "rows": different[:_MOST_ROWS],
        "left_out": max(0, len(different) - _MOST_ROWS),
        "same": len(rows) - len(different),
    }


def _flat(above: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{above}{name}.", value)
        else:
            yield f"{above}{name}", value
