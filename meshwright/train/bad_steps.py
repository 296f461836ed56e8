"""Steps whose numbers cannot be trusted: losses and norms that are not finite, and losses that leap."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

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
