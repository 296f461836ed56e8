"""Settings that exist with their final names but whose machinery does not yet: each is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.job.job import Job


@dataclass(frozen=True)
class Pending:
    """One field whose other values wait for machinery."""

    field: str
    works: Callable[[Any], bool]
    what: str
    remedy: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_ONE = "set it to 1"
PENDING = (
    Pending("run.max_restarts", _is(0), "restarts", "set it to 0"),
    Pending("run.watchdog_s", _is(0), "the watchdog", "set it to 0"),
    Pending("cluster.name", _is(None), "known clusters", "leave it out"),
    Pending("cluster.nodes", _is(1), "training on several machines", _ONE),
    Pending("cluster.gpus_per_node", _is(1), "training on several devices", _ONE),
)


def unimplemented(job: Job) -> list[str]:
    """One sentence for every field whose value nothing implements yet."""
    sentences = []
    for pending in PENDING:
        section, field = pending.field.split(".")
        value = getattr(getattr(job, section), field)
        if not pending.works(value):
            sentences.append(
                f"{pending.field} = {value!r} is not implemented yet ({pending.what}); {pending.remedy} for now"
            )
    return sentences
