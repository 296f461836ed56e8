"""A run's newest numbers as metrics of Ray, which its dashboard and Prometheus read."""

from pathlib import Path
from typing import Any

from meshwright.runs import RunFolder

_NAMES = ("step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu")


class Reporter:
    """Looks at a run folder and sets the gauges `meshwright_loss` and so on, labelled with the run."""

    def __init__(self, run: Path) -> None:
        from ray.util.metrics import Gauge

        self._folder, self._tags = RunFolder.open(run), {"run": str(run)}
        self._gauges: dict[str, Any] = {
            name: Gauge(f"meshwright_{name}", f"{name} of a Meshwright run", tag_keys=("run",)) for name in _NAMES
        }

    def look(self) -> None:
        """Report the newest row."""
        row = self._folder.newest().last()
        for name, gauge in self._gauges.items():
            if row is not None and isinstance(value := row.get(name), int | float):
                gauge.set(value, tags=self._tags)
