"""`meshwright.plan`: the fastest layouts of a job on a cluster, each as a job to continue with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.jobs import JobLike, is_preset, load_job

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.job.devices import Cluster
    from meshwright.plan import ErrorBars, Prediction

GIB = 2**30


@dataclass(frozen=True)
class PlannedLayout:
    """One layout: the job in it, and what it is predicted to take."""

    job: Job
    """The job that was planned, in this layout on these machines."""
    prediction: Prediction

    @property
    def words(self) -> str:
        """The layout in a line."""
        from meshwright.plan import layout_words

        return layout_words(self.job)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s

    @property
    def memory_gib(self) -> float:
        """GiB of the fullest device."""
        return self.prediction.fullest.device / GIB

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the device's peak; None where that is not known."""
        return self.prediction.mfu

    @property
    def bars(self) -> ErrorBars:
        """80% intervals of time and memory, and the measured runs that they rest on."""
        from meshwright.plan import error_bars

        return error_bars(self.job, self.job.cluster, self.prediction)

    def row(self) -> dict[str, Any]:
        """The numbers of a plan's table."""
        from meshwright.plan import limit

        bars = self.bars
        return {
            "layout": self.words,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.prediction.tokens_per_s_per_gpu,
            "tokens_per_s_per_gpu_low": bars.tokens_per_s_per_gpu[0],
            "tokens_per_s_per_gpu_high": bars.tokens_per_s_per_gpu[1],
            "mfu": self.mfu,
            "memory_gib": self.memory_gib,
            "memory_gib_low": bars.device_bytes[0] / GIB,
            "memory_gib_high": bars.device_bytes[1] / GIB,
            "fits": self.prediction.fits,
            "limited_by": limit(self.prediction),
        }


@dataclass(frozen=True)
class Plan:
    """Layouts of a job, fastest first."""

    layouts: tuple[PlannedLayout, ...]
    misses: tuple[str, ...]
    """Why the nearest faster layouts do not fit, a sentence each."""
    cluster: Cluster

    @property
    def best(self) -> PlannedLayout:
        """The fastest."""
        return self.layouts[0]

    @property
    def guessed(self) -> tuple[str, ...]:
        """What of the machines is guessed and not measured, a sentence each."""
        return self.best.prediction.guessed

    @property
    def evidence(self) -> str:
        """The measured runs nearest to the fastest layout, and how far their predicted times were off."""
        return self.best.bars.evidence

    @property
    def profile(self) -> str:
        """Which profile of the GPU was used, from where and when, or what its rates are derived from."""
        return self.best.prediction.profile

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: a dictionary for every layout."""
        return [layout.row() for layout in self.layouts]

    def __iter__(self) -> Iterator[PlannedLayout]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    def __str__(self) -> str:
        lines = ["   step s     80% interval     GiB    MFU  layout"]
        for one in self.layouts:
            mfu = "–" if one.mfu is None else f"{one.mfu:.1%}"
            between = "–".join(f"{end:.3g}" for end in one.bars.step_s)
            lines.append(f"{one.step_s:9.4g} {between:>16} {one.memory_gib:7.1f} {mfu:>6}  {one.words}")
        return "\n".join(lines)


def plan(
    job: JobLike,
    cluster: str | Cluster | None = None,
    *,
    batch_tokens: int | None = None,
    sequence_length: int | None = None,
    top: int = 10,
    allow: Collection[str] = (),
) -> Plan:
    """The fastest layouts of a job that fit a cluster (`8xh100`, `16x8xa100-80gb`, `16xleonardo`; else the job's own).

    A job file is planned as it is. In a job from elsewhere, as from a preset, what is not set is taken as usual: batch
    and sequence length for models of this size, bf16, compiled blocks. Needs no torch.
    """
    from meshwright.plan import find_layouts, order_of, predict, question, refusal, why_not

    own = load_job(job, trust=True)  # nothing of it is run
    exact = isinstance(job, str | Path) and not is_preset(str(job))
    asked = question(own, cluster, exact=exact, sequence_length=sequence_length, batch_tokens=batch_tokens)
    found = find_layouts(asked, top, allow)
    jobs = [_validated(candidate.job, asked.machines) for candidate in found.search.best]
    layouts = [PlannedLayout(one, predict(one, asked.machines)) for one in jobs]
    fitting = sorted((one for one in layouts if one.prediction.fits), key=lambda one: order_of(one.job, one.step_s))
    if not fitting:
        raise refusal(found, "the job")
    misses = tuple(why_not(miss, found.search) for miss in found.search.misses)
    return Plan(tuple(fitting), misses, asked.machines)


def _validated(job: Job, machines: Cluster) -> Job:
    """A layout of a search as a job that was checked as any other."""
    from meshwright.job import job_of_table

    table = job.model_dump(mode="json", exclude_unset=True)
    return job_of_table(table | {"cluster": machines.model_dump(mode="json", exclude_unset=True)}, "job")
