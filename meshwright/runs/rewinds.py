"""Rewinding to the last checkpoint after a bad step, if run.on_bad_step says so."""

import gc

from rich.console import Console

from meshwright.checkpoint import Lease
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.parallel import World
from meshwright.runs.folder import RunFolder
from meshwright.runs.rank_zero import from_rank_zero, on_rank_zero
from meshwright.runs.resume import begin, find_checkpoint
from meshwright.train import Start

MOST_REWINDS = 8
"""After this many in one attempt, rewinding no longer helps."""


class Rewinds:
    """Counts a run's bad steps. The first time, the same data is read again in case the hardware erred; a batch that is
    bad twice is skipped."""

    def __init__(self, folder: RunFolder | None, job: Job, world: World, console: Console) -> None:
        self._folder, self._job, self._world, self._console = folder, job, world, console
        self._bad: list[int] = []

    def start_again(self, start: Start, step: int, position: int) -> Start:
        """The start of a new attempt after a bad step; all ranks call this together."""
        start.activity.restart()
        gc.collect()  # frees the old weights before new ones are allocated
        self._bad.append(position)
        if len(self._bad) > MOST_REWINDS:
            raise UserError(
                f"step {step} is still bad after {MOST_REWINDS} rewinds; look at it with `meshwright replay "
                f"{start.lease.run} --step {step}`, lower optimizer.lr = {self._job.optimizer.lr} or change the data"
            )
        pass_over = frozenset(bad for bad in self._bad if self._bad.count(bad) > 1)
        found = find_checkpoint(start.lease.run, self._world, self._job.checkpoint.backup_to)

        def begin_again() -> Start:
            assert self._folder is not None
            to = 0 if found.checkpoint is None else found.checkpoint.facts.step
            self._folder.event("rewind", step=step, to=to, pass_over=sorted(pass_over))
            return begin(self._folder, self._job, found, self._console)

        begun = on_rank_zero(self._world, begin_again)
        attempt = from_rank_zero(self._world, 0 if begun is None else begun.lease.attempt)
        lease = Lease(start.lease.run, attempt) if begun is None else begun.lease
        return Start(lease, found.checkpoint, start.activity, pass_over, start.dtype)
