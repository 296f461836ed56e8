"""Where the loop reports to: the run folder in a real run, anything with these four methods in a test."""

from typing import Any, Protocol


class Recorder(Protocol):
    """Receives what happens in a run, one row at a time."""

    def metric(self, row: dict[str, Any]) -> None:
        """One row of numbers of a step or an evaluation."""

    def event(self, kind: str, **fields: Any) -> None:
        """An event: start, stop, a bad step."""

    def sample(self, step: int, text: str) -> None:
        """A text sample of a step."""

    def flush(self) -> None:
        """Retry writing what could not be written yet."""


class Progress(Protocol):
    """What is shown to people while the loop runs."""

    def step(self, row: dict[str, Any]) -> None:
        """A training step ended with these numbers."""

    def evaluation(self, step: int, val_loss: float) -> None:
        """An evaluation ended."""

    def message(self, text: str) -> None:
        """A line worth keeping on the screen."""


class Silent:
    """Recorder and progress that do nothing, for ranks that leave both to rank 0."""

    def metric(self, row: dict[str, Any]) -> None:
        """Not kept."""

    def event(self, kind: str, **fields: Any) -> None:
        """Not kept."""

    def sample(self, step: int, text: str) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing waits."""

    def step(self, row: dict[str, Any]) -> None:
        """Not shown."""

    def evaluation(self, step: int, val_loss: float) -> None:
        """Not shown."""

    def message(self, text: str) -> None:
        """Not shown."""
