"""The loss scale of fp16: gradients times a power of two, as large as the format's range allows.

Below 2⁻²⁴ fp16 has nothing, and a step's gradients are divided by its number of tokens: unscaled, most would be zero.
The scale enters where the loss is divided by that number, so that nothing small is ever rounded, and leaves with
clipping. All ranks decide alike: gradients that overflowed on one show in the sum of squares that all of them get.
"""

import math
from dataclasses import replace

from meshwright.data import Step
from meshwright.job import Job

START = 2.0**16
GROW_AFTER = 2000
"""Steps in a row without overflow after which the scale is doubled."""


class LossScale:
    """A scale that is halved when gradients overflow and doubled after many steps in which none did."""

    def __init__(self, start: float = START, grow_after: int = GROW_AFTER, *, dynamic: bool = True) -> None:
        self.scale, self.dynamic, self.skipped = start, dynamic, 0
        self._grow_after, self._good_steps = grow_after, 0

    @classmethod
    def of(cls, job: Job) -> "LossScale":
        """The scale a job starts with: formats with fp32's range have none, which is 1 for good."""
        return cls() if job.precision.compute == "fp16" else cls(1.0, dynamic=False)

    def applied_to(self, data: Step) -> Step:
        """The same data, counted so that losses and gradients come out times the scale."""
        return replace(data, valid_count=max(data.valid_count, 1) / self.scale) if self.dynamic else data

    def overflowed(self, loss: float, norm: float) -> bool:
        """Count a step by its (unscaled) loss and gradient norm; true when it must be skipped.

        A loss that is not finite, or gradients that are not with a scale of 1, are nothing a smaller scale could mend.
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
        """What a run needs to go on as it would have."""
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from a state."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self.skipped = int(state["skipped"])
