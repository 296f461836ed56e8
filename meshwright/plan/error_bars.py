"""How sure a prediction is: an 80% interval for its time and memory, and the measured runs that this rests on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, log
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan.interval import LEVEL, Spread
from meshwright.plan.machine import machine_of
from meshwright.plan.predict import Prediction, own_software
from meshwright.plan.residuals import Kind, evidence_of, residuals
from meshwright.plan.traits import AXES, Traits, is_calibrated, traits_of

if TYPE_CHECKING:
    from meshwright.plan.search import Candidate

_LIKE = 1.5
"""Distance up to which a run is called like another: one axis more and half the GPUs, or another GPU of the family."""
_FEW_ROWS, _FEW_SOURCES = 5, 2.0
"""Rows, and sources' worth of them, below which evidence is called little."""
_NEAREST = 10
"""Rows that are described if fewer are alike."""
_NAMED = 4


@dataclass(frozen=True)
class ErrorBars:
    """Between which values 80% of such predictions are expected to end up, lowest first."""

    step_s: tuple[float, float]
    tokens_per_s_per_gpu: tuple[float, float]
    device_bytes: tuple[float, float]
    relative_time: tuple[float, float]
    """Of the predicted time: what days, GPU-hours and costs are multiplied by."""
    timed_as: Traits
    """What the run is like, as far as its time depends on it."""
    held_as: Traits
    """The same for memory."""
    level: float = LEVEL

    @property
    def evidence(self) -> str:
        """The measured runs nearest to this one, and how far their predicted times were off."""
        return _evidence_words("time", self.timed_as)

    @property
    def memory_evidence(self) -> str:
        """The same for memory."""
        return _evidence_words("memory", self.held_as)

    def times(self, value: float) -> tuple[float, float]:
        """The interval of what is proportional to time."""
        return value * self.relative_time[0], value * self.relative_time[1]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "level": self.level,
            "step_s": list(self.step_s),
            "tokens_per_s_per_gpu": list(self.tokens_per_s_per_gpu),
            "device_bytes": list(self.device_bytes),
        }


def error_bars(job: Job, cluster: Cluster, prediction: Prediction) -> ErrorBars:
    """The intervals of a prediction for our own trainer on these machines."""
    machine = machine_of(cluster)
    software = own_software(job, on_cpu=machine.on_cpu)
    run = traits_of(job, machine.gpu.key, machine.gpus, software, calibrated=is_calibrated(machine))
    timed = _better_known(run)
    time, memory = _spread("time", timed), _spread("memory", run)
    fastest, slowest = time.of(1.0)
    rate = prediction.tokens_per_s_per_gpu
    return ErrorBars(
        time.of(prediction.step_s),
        (rate / slowest, rate / fastest),
        memory.of(prediction.fullest.device),
        (fastest, slowest),
        timed,
        run,
    )


def tied(best: "Sequence[Candidate]") -> tuple[bool, ...]:
    """Which layouts of a job predictions do not tell apart from the fastest, which is the first.

    Errors that layouts of one job share do not matter here, so the band is narrower than an interval.
    """
    bands = residuals().bands
    first = best[0]
    return tuple(
        log(one.prediction.step_s / first.prediction.step_s)
        <= bands["same" if _degrees(one.job) == _degrees(first.job) else "other"]
        for one in best
    )


def tie_words() -> str:
    """What a tie is, for the line below a table."""
    same, other = (expm1(residuals().bands[kind]) for kind in ("same", "other"))
    return (
        f"predictions order layouts correctly in 8 of 10 cases if they differ by more than {same:.0%}, or by "
        f"{other:.0%} if tp, cp, ep, pp or zero differ"
    )


def _degrees(job: Job) -> tuple[int, ...]:
    layout = job.layout
    return layout.tp, layout.cp, layout.ep, layout.pp, layout.zero_stage


def _better_known(run: Traits) -> Traits:
    """A run as if it had no profile, if more is known of such: a profile makes predictions no worse."""
    plain = replace(run, calibrated=False)
    return max((run, plain), key=lambda one: _spread("time", one).sources) if run.calibrated else run


@lru_cache(maxsize=256)
def _spread(kind: Kind, run: Traits) -> Spread:
    evidence, factor = evidence_of(kind)
    return evidence.spread(run, factor)


@lru_cache(maxsize=256)
def _evidence_words(kind: Kind, run: Traits) -> str:
    """The runs nearest to this one, in a line: how many, of which machines and layouts, whose, and how far off."""
    evidence, _ = evidence_of(kind)
    distance = evidence.distances(run)
    order = np.argsort(distance, kind="stable")
    like = [int(place) for place in order if distance[place] <= _LIKE]
    places = like if len(like) >= _FEW_ROWS else [int(place) for place in order[:_NEAREST]]
    rows = [evidence.runs[place] for place in places]
    half = median(abs(expm1(-evidence.errors[place])) for place in places)
    what = f"{len(rows)} runs on {_gpu_words(rows)}, {_axes_words(rows)}{_count_words(rows)}"
    said = f"{what}: {_source_words([evidence.sources[place] for place in places])}; half within {half:.1%}"
    missing = _missing(run, rows, kind)
    few = len(like) < _FEW_ROWS or _spread(kind, run).sources < _FEW_SOURCES
    lead = f"little is like it{missing}, so the interval is wider; nearest" if few else f"nearest{missing}"
    return f"{lead}: {said}"


def _missing(run: Traits, rows: Sequence[Traits], kind: Kind) -> str:
    """What none of the rows has."""
    lacks = []
    if run.family not in {row.family for row in rows}:
        lacks.append(f"on {run.gpu}")
    if kind == "time" and run.calibrated and not any(row.calibrated for row in rows):
        lacks.append("predicted from a profile")
    if not any(row.own for row in rows):
        lacks.append("of Meshwright itself")
    lacks += [f"with {axis}" for axis in AXES if axis in run.axes and not any(axis in row.axes for row in rows)]
    if run.gpus > 2 * (most := max(row.gpus for row in rows)):
        lacks.append(f"on more than {most:,} {'rank' if most == 1 and run.family == 'CPU' else 'GPU'}{'s'[: most > 1]}")
    return f" (none {', '.join(lacks)})" if lacks else ""


def _gpu_words(rows: Sequence[Traits]) -> str:
    names = [name for name, _ in Counter(row.gpu for row in rows).most_common()]
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _axes_words(rows: Sequence[Traits]) -> str:
    names = [name for name, _ in Counter(row.axes_words for row in rows).most_common()]
    return " or ".join(names[:2]) + (" or others" if len(names) > 2 else "")


def _count_words(rows: Sequence[Traits]) -> str:
    least, most = min(row.gpus for row in rows), max(row.gpus for row in rows)
    if most == 1:
        return ""
    ones = "ranks" if all(row.family == "CPU" for row in rows) else "GPUs"
    return f", {most:,} {ones}" if least == most else f", {least:,} to {most:,} {ones}"


def _source_words(sources: Sequence[str]) -> str:
    names = residuals().names
    called = [name for name, _ in Counter(names.get(source, source) for source in sources).most_common()]
    return ", ".join(called[:_NAMED]) + (" and others" if len(called) > _NAMED else "")
