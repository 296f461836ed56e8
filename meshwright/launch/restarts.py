"""Whether, when and with how many ranks a failed run restarts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.rank_failure import RankFailure
from meshwright.layout import ranks_of, require_layout
from meshwright.runs import RunFolder

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


@dataclass
class Restarts:
    """The failures of one launch so far, and how to restart after them."""

    job: Job
    used: int = 0
    _barren: int = 0
    """Consecutive failures without a completed step between."""
    _step: int = -1
    _attempt: int = -1
    """The last attempt that completed a step."""
    _rank: int | None = field(default=None)
    _same_rank: int = 0
    _gpus: int = 0
    """The GPUs the driver listed at the last failure."""
    _gone: tuple[int, ...] = ()
    """Of these, the GPUs whose ranks would not start."""

    def allows(self, cause: Exception, folder: RunFolder) -> bool:
        """Record a failure; returns whether to restart the run.

        A user error fails again however often it is retried, and so does running out of memory twice before a step is
        done. But an error before a restart's first step was not there when the run began: a disk that is read-only for
        a while may recover.
        """
        from meshwright.train import OutOfMemory  # with torch, which those who keep a run going else do without

        step, attempt = last_step(folder), max((row.get("attempt", 0) for row in folder.newest().rows), default=-1)
        refused = self.used > 0 and attempt == self._attempt
        self._attempt = attempt
        self._barren = 0 if step > self._step else self._barren + 1
        rank = getattr(cause, "rank", None)
        self._same_rank = self._same_rank + 1 if self._barren and rank == self._rank else 1
        self._step, self._rank = max(step, self._step), rank
        if isinstance(cause, OutOfMemory):
            return self.used < self.job.run.max_restarts and self._barren < 2
        return self.used < self.job.run.max_restarts and (refused or not isinstance(cause, UserError))

    def next(self, cause: Exception, folder: RunFolder, ranks: int) -> tuple[float, list[str]]:
        """Count and record a restart: returns how long to wait, and overrides for the job."""
        self.used += 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._barren - 1)) if self._barren else 0.0
        smaller = self._smaller(ranks)
        changed: dict[str, Any] = {}
        if smaller is not None:
            changed = {name: getattr(smaller.layout, name) for name in ("dp_replicate", "dp_shard")}
            self.job, self._same_rank = smaller, 0
        folder.event(
            "restart",
            restart=self.used,
            most=self.job.run.max_restarts,
            cause=cause_of(cause),
            rank=self._rank,
            step=max(0, self._step),
            wait_s=wait_s,
            ranks=ranks_of(self.job.layout),
        )
        return wait_s, [f"layout.{name}={value}" for name, value in changed.items()]

    def variables(self) -> dict[str, str]:
        """Variables that hide GPUs that are listed but whose ranks would not start."""
        if not self._gone:
            return {}
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = shown.split(",") if shown else [str(number) for number in range(self._gpus)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in self._usable(self._gone))}

    def _smaller(self, ranks: int) -> Job | None:
        """The job for fewer ranks, if allowed and needed: a GPU is lost, or a rank never starts."""
        if not self.job.run.may_shrink:
            return None
        import torch

        lost = self._rank if self._same_rank > 1 else None
        gpus = torch.cuda.device_count() if self.job.run.device in ("auto", "cuda") else 0
        if not gpus:
            return None if lost is None else shrunk(self.job, ranks - 1)
        if gpus != self._gpus:  # the remaining ones are renumbered
            self._gpus, self._gone, lost = gpus, (), None
        gone = self._gone if lost is None else (*self._gone, self._usable(self._gone)[lost])
        usable = len(self._usable(gone))
        smaller = shrunk(self.job, usable) if usable < ranks else None
        if lost is not None and (usable >= ranks or smaller is not None):
            self._gone, self._same_rank = gone, 0
        return smaller

    def _usable(self, gone: tuple[int, ...]) -> list[int]:
        return [number for number in range(self._gpus) if number not in gone]


def shrunk(job: Job, most: int) -> Job | None:
    """The job on as many of these ranks as it can use, by changing data-parallel axes only; None if none fits."""
    layout = job.layout
    options = [(replicas, layout.dp_shard) for replicas in range(1, layout.dp_replicate)]
    options += [(layout.dp_replicate, shards) for shards in range(1, layout.dp_shard)]
    jobs = [smaller for option in options if (smaller := _with_degrees(job, *option)) is not None]
    fitting = [smaller for smaller in jobs if ranks_of(smaller.layout) <= most]
    return max(fitting, key=lambda smaller: ranks_of(smaller.layout), default=None)


def _with_degrees(job: Job, replicas: int, shards: int) -> Job | None:
    values = job.model_dump()
    values["layout"] |= {"dp_replicate": replicas, "dp_shard": shards}
    try:
        smaller = Job.model_validate(values)
        require_layout(smaller, ranks_of(smaller.layout))
    except (ValidationError, UserError):  # the batch cannot be split that way
        return None
    return smaller


def last_step(folder: RunFolder) -> int:
    """The last step recorded by any attempt; -1 before the first."""
    steps: Sequence[int] = [row["step"] for row in folder.newest().rows if "loss" in row]
    return max(steps, default=-1)


def cause_of(error: BaseException) -> str:
    """One sentence."""
    report = str(error) if isinstance(error, UserError | RankFailure) else f"{type(error).__name__}: {error}"
    return report.splitlines()[0]
