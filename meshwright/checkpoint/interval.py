"""When a checkpoint is due: after a number of steps, a number of minutes, or as often as is worthwhile."""

import time
from collections.abc import Callable

from meshwright.cost import best_interval_s
from meshwright.job.running import Checkpoint as Settings

FIRST_AUTO_S = 60.0
"""auto: the first save comes after this time; what it costs sets the interval from then on."""


class Interval:
    """Every rank asks about steps, which all ranks agree on; only rank 0 asks about time."""

    def __init__(self, settings: Settings, mtbf_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._mtbf_s, self._clock = settings, mtbf_s, clock
        self._last = clock()
        self._auto_s = FIRST_AUTO_S

    @property
    def will_save(self) -> bool:
        """Whether checkpoints are saved before the run ends."""
        return bool(self._settings.every_steps or self._settings.every_minutes or self._settings.auto)

    def due_at(self, step: int) -> bool:
        """Whether the step's number calls for a checkpoint."""
        every = self._settings.every_steps or 0
        return bool(every) and step % every == 0

    def due_by_time(self) -> bool:
        """Whether enough time has passed since the last save."""
        waited_s = self._clock() - self._last
        if self._settings.every_minutes:
            return waited_s >= 60.0 * self._settings.every_minutes
        return self._settings.auto and waited_s >= self._auto_s

    def saved(self) -> None:
        """A save begins."""
        self._last = self._clock()

    def measured(self, pause_s: float, total_s: float) -> None:
        """Record how long a save blocked training and how long it took in all; saves do not overlap."""
        if self._mtbf_s is not None:
            self._auto_s = max(best_interval_s(pause_s, self._mtbf_s), total_s)
