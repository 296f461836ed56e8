"""Tune a job on this machine: short runs of the planner's best settings, then the loader that keeps up with them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.layout import resolve_for
from meshwright.measure.loading import cores
from meshwright.measure.sweep import Sweep
from meshwright.plan import Candidate, predict
from meshwright.plan.compare import cluster_here

RECOMPUTE = ("none", "selective", "full")
WORKERS = (0, 1, 2, 4, 8, 16, 32)
"""Of a loader, to try in this order, up to the cores that a rank has."""
ENOUGH, WAIT = 1.2, 0.01
"""A loader keeps up if it alone is faster than the step by this factor, and the step waits at most this share."""
_USUAL_MFU = (0.4, 0.6)
_SAFE = 0.97
"""Fraction of the device's memory above which a predicted setting is not tried."""

Setting = tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """One setting: its prediction and its result."""

    part: str
    """as given, micro-batch, loader, or loader alone."""
    setting: Setting
    predicted_tokens_per_s: float | None
    predicted_bytes: float | None
    state: str
    """measured, out of memory, refused or failed."""
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: int | None
    why: str = ""
    samples_per_s: float | None = None
    """Of a loader alone, which has no tokens_per_s of training."""
    wait_share: float | None = None
    """Of a step, measured in training or computed for a loader alone."""
    step_s: float | None = None
    """Of training, without its wait for data."""


@dataclass(frozen=True)
class Tuned:
    """Everything that was tried, and the fastest settings."""

    tried: tuple[Tried, ...]
    best: Setting
    before: Tried
    """The original job."""
    after: Tried

    @property
    def verdict(self) -> str:
        """The best setting compared with the original job and the usual MFU."""
        gain = (self.after.tokens_per_s or 0.0) / (self.before.tokens_per_s or 1.0) - 1
        report = f"{gain:+.1%} over the original job"
        if self.after.mfu is None:
            return report
        low, high = _USUAL_MFU
        where = "below" if self.after.mfu < low else "within" if self.after.mfu <= high else "above"
        return f"{report}; MFU {self.after.mfu:.1%}, {where} the usual {low:.0%} to {high:.0%}"


def tune(
    source: str,
    overrides: list[str],
    device: str,
    devices: int,
    file: Path,
    *,
    best: int,
    arguments: tuple[str, ...],
    report: Callable[[Tried], None],
) -> Tuned:
    """Measure the original job, the planner's `best` micro-batches and recomputations, then loaders, pinned or not.

    Loaders are measured alone; a short run confirms the first that keeps up with the fastest step.
    """
    job = load_job(source, overrides, trust=True).job  # bench runs it, and asks for trust
    run = _Runs(source, tuple(overrides), file, arguments, report)
    before = run.one("as given", (), _expected(job, device, devices))
    tried, seen = [before], {_named(job)}
    for setting, candidate in _settings(source, overrides, job, device, devices, best):
        if _named(candidate.job if candidate else load_job(source, [*overrides, *setting], trust=True).job) in seen:
            continue
        tried.append(run.one("micro-batch", setting, candidate))
        if tried[-1].state == "out of memory":  # the prediction was wrong: try half of it, to confirm what fits
            half = _halved(source, overrides, setting)
            if half is not None:
                tried.append(run.one("micro-batch", half, None))
    fastest = _fastest(tried)
    for decode in ("cpu", "gpu") if job.data.fields and device != "CPU" else (None,):
        alone, chosen = _loader(run, fastest, decode, devices)
        tried += alone
        now = load_job(source, [*overrides, *fastest.setting], trust=True).job.data
        new = load_job(source, [*overrides, *chosen], trust=True).job.data
        if new != now:
            tried.append(run.one("loader", chosen, None))
    if device != "CPU":  # which needs no copies
        pinned = load_job(source, [*overrides, *_fastest(tried).setting], trust=True).job.data.pin_memory
        setting = (*_fastest(tried).setting, f"data.pin_memory={str(not pinned).lower()}")
        tried.append(run.one("loader", setting, None))
    after = _fastest(tried)
    return Tuned(tuple(tried), after.setting, before, after)


@dataclass(frozen=True)
class _Runs:
    source: str
    overrides: Setting
    file: Path
    arguments: tuple[str, ...]
    report: Callable[[Tried], None]

    def one(self, part: str, setting: Setting, candidate: Candidate | None) -> Tried:
        """One short run in its own process, or an earlier result from the file."""
        sweep = Sweep(self.source, self.overrides, [setting], self.arguments, self.file)
        for _ in sweep.run():
            pass
        row = sweep.done()[setting]
        result: dict[str, Any] = row.get("result", {})
        rate = size = step_s = None
        if "step_s" in result:
            step_s = result["step_s"]["median"] * (1 - result["data_wait_share"])
        if candidate is not None:
            rate = candidate.job.tokens_per_step / candidate.prediction.step_s
            size = candidate.prediction.fullest.allocated
        tried = Tried(
            part,
            setting,
            rate,
            size,
            row["state"],
            result.get("tokens_per_s"),
            result.get("mfu"),
            result.get("peak_memory_bytes"),
            row.get("why", ""),
            wait_share=result.get("data_wait_share"),
            step_s=step_s,
        )
        self.report(tried)
        return tried

    def loader(self, setting: Setting, step_s: float) -> Tried:
        """A loader alone, next to a step of so many seconds."""
        arguments = (*self.arguments, "--data", "--step-time", f"{step_s:.6g}")
        sweep = Sweep(self.source, self.overrides, [setting], arguments, self.file)
        for _ in sweep.run():
            pass
        row = sweep.done()[setting]
        result: dict[str, Any] = row.get("result", {})
        rate, share = result.get("samples_per_s"), result.get("data_wait_share")
        nothing = (None,) * 2
        tried = Tried(
            "loader alone", setting, *nothing, row["state"], None, *nothing, row.get("why", ""), rate, share, step_s
        )
        self.report(tried)
        return tried


def _loader(run: _Runs, fastest: Tried, decode: str | None, ranks: int) -> tuple[list[Tried], Setting]:
    """Loaders alone with more and more workers until one keeps up with the fastest step, and that one's setting; if
    none does, the one with the shortest wait."""
    job = load_job(run.source, [*run.overrides, *fastest.setting], trust=True).job
    where = () if decode is None else (f"data.decode={decode}",)
    step_s = fastest.step_s or job.tokens_per_step / (fastest.tokens_per_s or 1.0)
    needed = ENOUGH * job.batch.global_batch / step_s
    tried: list[Tried] = []
    for workers in WORKERS:
        if workers > 1 and workers * ranks > cores():
            break
        tried.append(run.loader((*fastest.setting, *where, f"data.workers={workers}"), step_s))
        last = tried[-1]
        if last.wait_share is not None and last.wait_share <= WAIT and (last.samples_per_s or 0.0) >= needed:
            return tried, last.setting
    measured = [one for one in tried if one.wait_share is not None]
    if not measured:
        return tried, fastest.setting
    return tried, min(measured, key=lambda one: (one.wait_share or 0.0, -(one.samples_per_s or 0.0))).setting


def _fastest(tried: list[Tried]) -> Tried:
    measured = [one for one in tried if one.tokens_per_s is not None]
    if not measured:
        raise UserError(f"no setting of the job ran ({tried[0].why}); fix the job or lower batch.micro_batch")
    return max(measured, key=lambda one: one.tokens_per_s or 0.0)


def _named(job: Job) -> tuple[int, str]:
    return job.batch.micro_batch, str(job.memory.recompute)


def _expected(job: Job, device: str, devices: int) -> Candidate | None:
    cluster = cluster_here(job, device, devices)
    if cluster is None or job.model.file is not None:
        return None
    try:
        job = resolve_for(job, cluster)
        return Candidate(job, predict(job, cluster))
    except UserError:
        return None


def _settings(
    source: str, overrides: list[str], job: Job, device: str, devices: int, best: int
) -> Iterator[tuple[Setting, Candidate | None]]:
    """The settings worth running, most promising first: by prediction if there is one, else the largest of each."""
    share = job.batch.global_batch // job.data_parallel
    micros = [size for size in range(1, share + 1) if share % size == 0]
    found: list[tuple[Setting, Candidate | None]] = []
    for mode in RECOMPUTE:
        for micro in micros:
            setting = (f"batch.micro_batch={micro}", f'memory.recompute="{mode}"')
            try:
                other = load_job(source, [*overrides, *setting], trust=True).job
            except UserError:
                continue
            candidate = _expected(other, device, devices)
            if candidate is None or candidate.prediction.fullest.device <= _SAFE * candidate.prediction.capacity_bytes:
                found.append((setting, candidate))
    found.sort(key=lambda one: one[1].prediction.step_s if one[1] else -int(one[0][0].rpartition("=")[2]))
    yield from found[:best]


def _halved(source: str, overrides: list[str], setting: Setting) -> Setting | None:
    micro = load_job(source, [*overrides, *setting], trust=True).job.batch.micro_batch
    if micro % 2:
        return None
    return tuple(f"batch.micro_batch={micro // 2}" if word.startswith("batch.micro") else word for word in setting)
