"""Steps whose numbers cannot be trusted: losses and norms that are not finite, and loss spikes."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.train.recorder import Recorder

WINDOW, FEWEST = 64, 16
"""How many recent losses a new one is compared with; no verdict with fewer."""
_NORMAL = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation."""
_LEAST_SPREAD = 1e-3
"""Fraction of the median loss: on a flat plateau, not every ripple is a spike."""


class Rewind(Exception):
    """Requests a rewind to the last checkpoint: the step from some position of the data was bad."""

    def __init__(self, step: int, position: int) -> None:
        super().__init__(f"step {step} was bad")
        self.step, self.position = step, position


class RecentLosses:
    """The last losses that were not spikes."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def score(self, loss: float) -> float | None:
        """How many robust standard deviations a loss is above the median; None if too few are known."""
        if len(self._losses) < FEWEST:
            return None
        middle = median(self._losses)
        spread = _NORMAL * median(abs(value - middle) for value in self._losses)
        return (loss - middle) / max(spread, _LEAST_SPREAD * abs(middle), 1e-12)

    def add(self, loss: float) -> None:
        """Add a loss."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def values(self) -> tuple[float, ...]:
        """The losses to save in a checkpoint, so that a resumed run decides the same."""
        return tuple(self._losses)


class BadSteps:
    """Implements run.on_bad_step: what to do on a non-finite loss or gradient norm, or a loss spike."""

    def __init__(self, job: Job, recorder: Recorder, losses: Iterable[float] = ()) -> None:
        self._job, self._recorder = job, recorder
        self.losses = RecentLosses(losses)

    def may_update(self, step: int, loss: float, norm: float, position: int) -> bool:
        """Whether to apply the step's update; if the job says so, a bad step stops the run or rewinds instead."""
        settings = self._job.run
        score = self.losses.score(loss) if settings.spike_score else None
        if math.isfinite(loss) and math.isfinite(norm) and (score is None or score <= settings.spike_score):
            if settings.spike_score:
                self.losses.add(loss)
            return True
        policy = settings.on_bad_step
        data = {"position": position, "samples": self._job.batch.global_batch}
        self._recorder.event("bad_step", step=step, loss=loss, grad_norm=norm, score=score, policy=policy, **data)
        if policy == "rewind":
            raise Rewind(step, position)
        if policy == "stop":
            leap = "" if score is None else f" ({score:.1f} robust deviations above the recent losses)"
            raise UserError(
                f"step {step} has loss {loss}{leap} and gradient norm {norm}; lower optimizer.lr = "
                f'{self._job.optimizer.lr} or set run.on_bad_step = "skip"'
            )
        return policy == "keep"
