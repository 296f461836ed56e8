"""The largest budget of activations with which a layout fits: as little recomputation as its memory allows."""

from collections.abc import Callable
from math import floor, log10

from meshwright.job import Job
from meshwright.job.devices import Budget
from meshwright.layout import sure_budget
from meshwright.plan.step import table_for

GIB = 2**30
_TRIES = 3


def within(job: Job, room_bytes: float, device_bytes: Callable[[Job], float]) -> Job | None:
    """A job without recomputation with a budget under which it takes at most `room_bytes`; None if there is none.

    A budget counts what blocks save; what the device holds beside it is seen by trying.
    """
    least, most = sure_budget(job, table_for(job))
    budget = float(most)
    over = device_bytes(job) - room_bytes
    for _ in range(_TRIES):
        budget -= over
        tried = _budgeted(job, max(budget, 1.02 * least))
        over = device_bytes(tried) - room_bytes
        if over <= 0:
            return tried
        if budget < least:
            break
    return None


def _budgeted(job: Job, budget_bytes: float) -> Job:
    """With a budget in GiB of three digits, rounded down."""
    step = 10.0 ** (floor(log10(budget_bytes / GIB)) - 2)
    budget = Budget(budget_gib=round(floor(budget_bytes / GIB / step) * step, 6))
    return job.model_copy(update={"memory": job.memory.model_copy(update={"recompute": budget})})
