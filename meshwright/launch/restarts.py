"""Whether, when and with how many ranks a failed run restarts."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.launch.rank_failure import RankFailure
from meshwright.layout import expert_ranks, ranks_of, require_layout
from meshwright.runs import RunFolder

_DATA_AXES = ("dp_replicate", "dp_shard")
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
    why_not_smaller: str | None = None
    """Why the last restart has as many ranks as before, although a rank is lost and run.may_shrink is set."""

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
        self.why_not_smaller = None
        smaller = self._smaller(ranks)
        changed: dict[str, Any] = {}
        if smaller is not None:
            names = (*_DATA_AXES, "ep") if smaller.layout.ep != self.job.layout.ep else _DATA_AXES
            changed = {name: getattr(smaller.layout, name) for name in names}
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
            **({} if self.why_not_smaller is None else {"why_not_smaller": self.why_not_smaller}),
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
            return None if lost is None else self._on(ranks - 1)
        if gpus != self._gpus:  # the remaining ones are renumbered
            self._gpus, self._gone, lost = gpus, (), None
        gone = self._gone if lost is None else (*self._gone, self._usable(self._gone)[lost])
        usable = len(self._usable(gone))
        smaller = self._on(usable) if usable < ranks else None
        if lost is not None and (usable >= ranks or smaller is not None):
            self._gone, self._same_rank = gone, 0
        return smaller

    def _on(self, most: int) -> Job | None:
        smaller = shrunk(self.job, most)
        if smaller is None:
            self.why_not_smaller = why_not_smaller(self.job, most)
        return smaller

    def _usable(self, gone: tuple[int, ...]) -> list[int]:
        return [number for number in range(self._gpus) if number not in gone]


def shrunk(job: Job, most: int) -> Job | None:
    """The job on as many of these ranks as it can use, by changing data-parallel axes only, and the degree of expert
    parallelism where it does not divide their ranks; None if nothing fits."""
    jobs = [smaller for _, smaller in _smaller_jobs(job, most) if isinstance(smaller, Job)]
    return max(jobs, key=lambda smaller: ranks_of(smaller.layout), default=None)


def why_not_smaller(job: Job, most: int) -> str:
    """Why `shrunk` has nothing, by what refuses the layout of most ranks."""
    refusals = [(ranks, refusal) for ranks, refusal in _smaller_jobs(job, most) if isinstance(refusal, str)]
    layout = job.layout
    others = ranks_of(layout) // (layout.dp_replicate * layout.dp_shard)
    if not refusals:
        return (
            f"run.may_shrink = true changes only layout.dp_replicate = {layout.dp_replicate} and layout.dp_shard = "
            f"{layout.dp_shard}, and {most} ranks are fewer than the {others} of the other axes"
        )
    ranks, refusal = max(refusals)
    return f"run.may_shrink = true has no layout for {most} ranks; with {ranks}: {refusal}"


def _smaller_jobs(job: Job, most: int) -> Iterator[tuple[int, Job | str]]:
    """The job with fewer data-parallel ranks, or why there is no such job, and how many ranks it has: at most these."""
    layout = job.layout
    options = [(replicas, layout.dp_shard) for replicas in range(1, layout.dp_replicate)]
    options += [(layout.dp_replicate, shards) for shards in range(1, layout.dp_shard)]
    for replicas, shards in options:
        smaller = layout.model_copy(update={"dp_replicate": replicas, "dp_shard": shards})
        if ranks_of(smaller) <= most:
            yield ranks_of(smaller), _in_layout(job, smaller)


def _in_layout(job: Job, layout: Layout) -> Job | str:
    values = job.model_dump()
    values["layout"] = layout.model_dump() | {"ep": _expert_degree(job, layout)}
    try:
        smaller = Job.model_validate(values)
        require_layout(smaller, ranks_of(smaller.layout))
    except ValidationError as error:  # the batch cannot be split that way
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    except UserError as error:
        return str(error)
    return smaller


def _expert_degree(job: Job, layout: Layout) -> int:
    """The degree of expert parallelism; where the ranks that share experts no longer divide by it, the largest below it
    that divides them and the experts."""
    ranks = expert_ranks(job.model_copy(update={"layout": layout}))
    if job.model.experts is None or ranks % layout.ep == 0:
        return layout.ep
    both = gcd(job.model.experts.count, ranks)
    return max(degree for degree in range(1, layout.ep + 1) if both % degree == 0)


def last_step(folder: RunFolder) -> int:
    """The last step recorded by any attempt; -1 before the first."""
    steps: Sequence[int] = [row["step"] for row in folder.newest().rows if "loss" in row]
    return max(steps, default=-1)


def cause_of(error: BaseException) -> str:
    """One sentence."""
    report = str(error) if isinstance(error, UserError | RankFailure) else f"{type(error).__name__}: {error}"
    return report.splitlines()[0]
