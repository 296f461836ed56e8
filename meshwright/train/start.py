"""What a rank begins a training with: nothing, or where an earlier attempt left off."""

from dataclasses import dataclass, field

import torch

from meshwright.checkpoint import Checkpoint, Lease
from meshwright.data import Cursor
from meshwright.train.activity import Activity
from meshwright.train.state import saved_cursors


@dataclass(frozen=True)
class Start:
    """The claim on the run folder and the checkpoint to go on from."""

    lease: Lease
    checkpoint: Checkpoint | None
    activity: Activity = field(default_factory=Activity)
    pass_over: frozenset[int] = frozenset()
    """Positions of batches that came out bad again and again."""
    dtype: torch.dtype | None = None
    """Format of masters, gradients and computation where it is not the job's: a proof's."""

    @property
    def position(self) -> int:
        """The first sample of the global stream to read."""
        return 0 if self.checkpoint is None else self.checkpoint.facts.position

    @property
    def step(self) -> int | None:
        """The step that was saved last."""
        return None if self.checkpoint is None else self.checkpoint.facts.step

    def cursors(self) -> dict[int, Cursor] | None:
        """Where a stream goes on, shard by shard."""
        return None if self.checkpoint is None else saved_cursors(self.checkpoint)
