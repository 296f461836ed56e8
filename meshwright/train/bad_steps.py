"""Steps whose numbers cannot be trusted: losses and norms that are not finite, and losses that leap."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.train.recorder import Recorder

WINDOW, FEWEST = 64, 16
"""Losses a new one is compared with: the last so many, and no verdict on fewer."""
_NORMAL = 1.4826
"""The median deviation of a normal distribution times this is its standard deviation."""
_LEAST_SPREAD = 1e-3
"""Of the median loss: on a plateau so flat that nothing varies, not every ripple is a spike."""


class Rewind(Exception):
    """Asks for the last checkpoint: the step that was made from some position of the data came out bad."""

    def __init__(self, step: int, position: int) -> None:
        super().__init__(f"step {step} came out bad")
        self.step, self.position = step, position


class RecentLosses:
    """The last losses that were no spikes."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def score(self, loss: float) -> float | None:
        """How many robust standard deviations a loss lies above the median; None where too few are known."""
        if len(self._losses) < FEWEST:
            return None
        middle = median(self._losses)
        spread = _NORMAL * median(abs(value - middle) for value in self._losses)
        return (loss - middle) / max(spread, _LEAST_SPREAD * abs(middle), 1e-12)

    def add(self, loss: float) -> None:
        """Remember a loss."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def values(self) -> tuple[float, ...]:
        """What a checkpoint must keep, so that a resumed run judges alike."""
        return tuple(self._losses)


class BadSteps:
    """run.on_bad_step at work: what a loss or gradient norm that is not finite does, and a loss that leaps."""

    def __init__(self, job: Job, recorder: Recorder, losses: Iterable[float] = ()) -> None:
        self._job, self._recorder = job, recorder
        self.losses = RecentLosses(losses)

    def may_update(self, step: int, loss: float, norm: float, position: int) -> bool:
        """Whether the step's update is made; where the job says so, a bad one ends the run or goes back instead."""
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
            leap = "" if score is None else f" ({score:.1f} robust deviations above the last ones)"
            raise UserError(
                f"step {step} gave loss {loss}{leap} and gradient norm {norm}; lower optimizer.lr = "
                f'{self._job.optimizer.lr} or set run.on_bad_step = "skip"'
            )
        return policy == "keep"
