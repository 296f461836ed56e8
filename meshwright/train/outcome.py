"""How a run went: the numbers of each step, and how it ended."""

from dataclasses import dataclass


@dataclass
class Outcome:
    """How a run ended."""

    reason: str = "finished"
    """finished, or interrupted if a stop was requested."""
    step: int = 0
    loss: float | None = None
    first_val_loss: float | None = None
    val_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    """The peak since the end of the first step: allocated on a GPU, resident on a CPU."""
    steady_memory_bytes: int | None = None
    """Memory between the last two steps."""
    sample: str | None = None
    uncompiled: str | None = None
    """Says that no block was compiled although all should be, and why; None if any was."""
    backup_missing: str | None = None
    """Says that the last checkpoint has no backup, and why; None if it has one, or if the job wants none."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step."""

    step: int
    loss: float
    norm: float
    rate: float
    data_wait_s: float
    step_s: float
