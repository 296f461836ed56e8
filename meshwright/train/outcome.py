"""How a run went: what each step came to, and how it all ended."""

from dataclasses import dataclass


@dataclass
class Outcome:
    """How a run ended."""

    reason: str = "finished"
    """finished, or interrupted when a stop was asked for."""
    step: int = 0
    loss: float | None = None
    first_val_loss: float | None = None
    val_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    """The most that was held since the first step ended: allocated on a GPU, resident on a CPU."""
    steady_memory_bytes: int | None = None
    """What was held between the last two steps."""
    sample: str | None = None


@dataclass(frozen=True)
class StepNumbers:
    """What a step came to."""

    step: int
    loss: float
    norm: float
    rate: float
    data_wait_s: float
    step_s: float
