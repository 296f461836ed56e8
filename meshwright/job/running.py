"""The sections on the run itself: run, checkpoint, log."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from meshwright.job.names import SinkName
from meshwright.job.section import Section


class Run(Section):
    """The run itself: how long, where, on which device, with which seed."""

    steps: PositiveInt = Field(default=1000, le=10**12)
    """Optimizer steps."""
    folder: str | None = None
    """The run folder; default runs/<job>-<time>."""
    seed: NonNegativeInt = Field(default=0, le=2**63 - 1)
    """Determines initial weights, data order and dropout."""
    device: str = "auto"
    """auto (the first GPU, else the CPU), cpu, cuda or cuda:N."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile every block; auto does on a GPU, unless the layout does not support it."""
    cuda_graph: bool = False
    """Launch forward and backward of a micro-batch as one CUDA graph, on one GPU with static shapes; continues without
    if that is not possible, with an event that says why."""
    deterministic: bool = False
    """Use only algorithms that are bitwise reproducible, at some cost in speed on a GPU."""
    max_restarts: NonNegativeInt = Field(default=0, le=10**6)
    """Restarts after a failure, each from the last checkpoint, before giving up."""
    may_shrink: bool = False
    """Restart with fewer data-parallel ranks if a GPU is lost or one rank fails twice without a step between;
    no effect under torchrun and Slurm, which decide how many ranks there are."""
    watchdog_s: NonNegativeFloat = Field(default=0.0, le=1e7)
    """Seconds after which a rank without progress is reported and the run restarted; longer than any step; 0 is off."""
    on_bad_step: Literal["stop", "skip", "rewind", "keep"] = "stop"
    """What to do on a loss spike or a non-finite loss or gradient norm: stop, skip the update, rewind, or continue."""
    spike_score: NonNegativeFloat = Field(default=0.0, le=1e12)
    """A loss this many robust deviations above the recent ones is a bad step; 10 is a good start, 0 is off."""

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled; not until auto is resolved for a device."""
        return self.compile is True


class Checkpoint(Section):
    """When the full state is saved, in the background, and how many are kept; the end of a run always saves."""

    every_steps: NonNegativeInt | None = Field(default=None, le=10**12)
    """Steps between checkpoints; 0 is never, so that only the end is saved."""
    every_minutes: NonNegativeFloat | None = Field(default=None, le=1e7)
    """Minutes between checkpoints; 0 is never."""
    auto: bool = False
    """Choose the interval that loses the least time, from the measured cost of a save and cluster.mtbf_hours."""
    keep_last: PositiveInt = Field(default=2, le=10**6)
    """Number of newest checkpoints to keep."""
    keep_every: NonNegativeInt | None = Field(default=None, le=10**12)
    """Checkpoints at multiples of this many steps are never deleted; 0 keeps none of them."""
    backup_to: str | None = Field(default=None, min_length=1)
    """A second place to copy every checkpoint to: a folder or any address fsspec supports, e.g. `s3://bucket/runs`."""

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        given = [name for name in ("every_steps", "every_minutes", "auto") if getattr(self, name)]
        if len(given) > 1:
            shown = " and ".join(f"checkpoint.{name} = {getattr(self, name)}" for name in given)
            raise ValueError(f"{shown} are two intervals; keep one of them")
        return self


class Log(Section):
    """What is printed, and where else the metrics are sent."""

    every_steps: NonNegativeInt = Field(default=10, le=10**12)
    """Steps between printed lines, 0 for none; every step is recorded in metrics.jsonl."""
    sinks: tuple[SinkName, ...] = ()
    """Where else to send the same stream of metrics: wandb, tensorboard, mlflow, or your own."""
