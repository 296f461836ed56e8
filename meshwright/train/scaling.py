"""The loss scale of fp16: gradients times a power of two, as large as the format's range allows.

fp16 has no values below 2⁻²⁴, and a step's gradients are divided by its number of tokens: unscaled, most would be zero.
The scale is applied where the loss is divided by that number, so that nothing small is ever rounded, and removed with
clipping. All ranks decide the same: gradients that overflow on one show in the sum of squares that all of them get.
"""

import math
from dataclasses import replace

from meshwright.data import Step
from meshwright.job import Job

START = 2.0**16
GROW_AFTER = 2000
"""Consecutive steps without overflow after which the scale is doubled."""


class LossScale:
    """A scale that is halved when gradients overflow and doubled after many steps without overflow."""

    def __init__(self, start: float = START, grow_after: int = GROW_AFTER, *, dynamic: bool = True) -> None:
        self.scale, self.dynamic, self.skipped = start, dynamic, 0
        self._grow_after, self._good_steps = grow_after, 0

    @classmethod
    def of(cls, job: Job) -> "LossScale":
        """The scale a job starts with: formats with fp32's range always use 1."""
        return cls() if job.precision.format == "fp16" else cls(1.0, dynamic=False)

    def applied_to(self, data: Step) -> Step:
        """The same data, with counts that make losses and gradients come out times the scale."""
        return replace(data, valid_count=max(data.valid_count, 1) / self.scale) if self.dynamic else data

    def overflowed(self, loss: float, norm: float) -> bool:
        """Count a step by its (unscaled) loss and gradient norm; true if it must be skipped.

        A smaller scale cannot fix a non-finite loss, nor non-finite gradients at a scale of 1.
        """
        if not self.dynamic:
            return False
        if math.isfinite(norm):
            self._good_steps += 1
            if self._good_steps == self._grow_after:
                self.scale, self._good_steps = self.scale * 2, 0
            return False
        if not math.isfinite(loss) or self.scale <= 1.0:
            return False
        self.scale, self._good_steps = self.scale / 2, 0
        self.skipped += 1
        return True

    def state_dict(self) -> dict[str, float | int]:
        """What a run needs to resume exactly."""
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Resume from a state."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self.skipped = int(state["skipped"])
