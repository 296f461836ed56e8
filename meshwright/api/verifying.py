"""`meshwright.verify`: whether a job's layout computes what one process computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.api.jobs import JobLike, load_job
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.job.devices import Layout
    from meshwright.verify import Change, Comparison, Outcome, Verdict
    from meshwright.verify.run_plan import Leg


@dataclass(frozen=True)
class Report:
    """What came of it."""

    verdict: Verdict
    changes: tuple[Change, ...]
    """What the check does otherwise than the job says."""
    layout: Layout
    """Of the small job."""
    legs: tuple[Leg, ...] = ()
    """Of a run: the layouts it went through."""
    nccl: Outcome | None = None
    """What NCCL accepts of the recorded collectives; None if they were not, or if there is no GPU here."""

    @property
    def equal(self) -> bool:
        """Whether every number is as one process computes it."""
        return self.verdict.equal

    @property
    def ok(self) -> bool:
        """Equal, and no collective breaks the contract or is refused by NCCL where they were recorded."""
        return self.verdict.ok and (self.nccl is None or self.nccl.ok)

    @property
    def ranks(self) -> int:
        """How many ran the layout."""
        from meshwright.layout import ranks_of

        return ranks_of(self.layout)

    @property
    def nothing_compared(self) -> str | None:
        """That a layout of one rank left nothing to compare, and what was checked; None where there was something."""
        if self.ranks > 1 or self.legs:
            return None
        return f"Nothing compared: the layout has one rank. Checked: {', '.join(self._checked_alone())}."

    def _checked_alone(self) -> list[str]:
        """What one rank does differently from the plain process that it was checked against."""
        job, rows = self.verdict.job, self.verdict.rows
        checked = ["that the job trains"]
        if job.accumulation > 1:
            checked.append(f"{job.accumulation} micro-batches as the batch at once")
        if job.run.compiles:
            checked.append("compiled blocks as eager ones")
        if job.memory.recompute != "none":
            checked.append("recomputed blocks as others")
        if job.data.workers:
            checked.append("data from workers as from this process")
        checked += [f"{form} within its bounds" for form in dict.fromkeys(row.format for row in rows) if form]
        checked += [f"no output depends on {row.name}" for row in rows if row.kind == "leak"]
        return checked

    @property
    def rows(self) -> list[Comparison]:
        """Every comparison: kind, name, error and bound."""
        return self.verdict.rows

    @property
    def worst(self) -> Comparison:
        """The one with the largest error for its bound."""
        from meshwright.verify import worst

        return worst(self.verdict.rows)

    @property
    def first_wrong(self) -> Comparison | None:
        """Where to begin looking when they are not equal."""
        return self.verdict.first_wrong

    @property
    def notes(self) -> list[str]:
        """What is not as the job says, a sentence each."""
        return [change.text for change in self.changes] + self.verdict.notes

    @property
    def not_checked(self) -> list[str]:
        """Those of them that could hide an error."""
        return [change.text for change in self.changes if change.hides]

    def __str__(self) -> str:
        wrong = self.first_wrong
        if wrong is None and self.nothing_compared is not None:
            return self.nothing_compared
        if wrong is None:
            return f"equal: {self.ranks} ranks compute what one process computes, worst error {self.worst.error:.1e}"
        if wrong.kind == "leak":
            return f"wrong: {wrong.note}"
        return f"not equal: first diverging is the {wrong.kind} of {wrong.name}, off by {wrong.error:.1e}"


def verify(
    job: JobLike,
    *,
    steps: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    collectives: bool = False,
    run: bool = False,
) -> Report:
    """Make a job small, train it in one process and in its layout, and compare losses, gradients and updates.

    With `run` it goes through `train`: data, evaluations, checkpoints, resumes in other layouts. `steps` are 3, or 8
    then; `dtype` is float64, or then float32 if the model has no experts. Ranks are forked from this process.
    """
    from meshwright.layout import ranks_of, require_layout

    own = load_job(job)
    dtype = dtype or (run_format(own) if run else "float64")
    require_format(dtype, device)
    require_layout(own, ranks_of(own.layout))
    from meshwright.verify import check_job, replay_on_gpu, require_real_size, resolved_for_check, shrink

    own, unchecked = resolved_for_check(own, device)
    unchecked += require_real_size(own)
    if run:
        return _verify_run(own, steps or 8, dtype, device, unchecked)
    small, changes = shrink(own, steps or 3, device)
    verdict = check_job(own, small, dtype, device, collectives)
    nccl = None if verdict.collectives is None else replay_on_gpu(verdict.collectives.calls)
    return Report(verdict, (*changes, *unchecked), small.layout, nccl=nccl)


def _verify_run(own: Job, steps: int, dtype: str, device: str, unchecked: list[Change]) -> Report:
    from meshwright.launch.worker import run_quietly
    from meshwright.verify.replay import routes
    from meshwright.verify.run_check import check_run
    from meshwright.verify.run_compare import ROUNDING
    from meshwright.verify.run_plan import legs_of, small_run
    from meshwright.verify.run_text import is_prepared_data

    if dtype not in ROUNDING:
        raise UserError(f"--dtype {dtype} has no error bounds for runs; use {' or '.join(ROUNDING)} with --run")
    if device != "cpu":
        raise UserError(f"--device {device}: runs are verified on the CPU; leave it out with --run")
    if dtype != run_format(own) and routes(own):
        raise UserError(
            f"--dtype {dtype}: rounding may send a token to other experts in another layout, and a run cannot be given "
            "the routing of one process; use float64 with --run"
        )
    small, changes = small_run(own, steps)
    verdict = check_run(small, run_quietly, dtype, is_prepared_data(own.data))
    return Report(verdict, (*changes, *unchecked), small.layout, tuple(legs_of(small)))


def run_format(job: Job) -> str:
    """The format in which a run is checked if none is given: float32 as jobs run, float64 if tokens choose experts."""
    from meshwright.verify.replay import routes

    return "float64" if routes(job) else "float32"


def require_format(dtype: str, device: str) -> None:
    """Refuse a number format or a device that nothing can be verified in."""
    import torch

    from meshwright.verify import FORMATS

    if dtype not in FORMATS:
        raise UserError(f"--dtype {dtype} is not supported; use {', '.join(FORMATS)}")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not supported; use cpu or cuda")
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UserError("--device cuda: this machine has no CUDA device; leave it out to verify on the CPU")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UserError(
            "verify forks its ranks, which a process that has used a GPU cannot; call it before anything trains, or in "
            "a process of its own"
        )
