"""What a rank starts a training with: nothing, or an earlier attempt's state."""

from dataclasses import dataclass, field

import torch

from meshwright.checkpoint import Checkpoint, Lease
from meshwright.data import Cursor
from meshwright.train.activity import Activity
from meshwright.train.state import saved_cursors


@dataclass(frozen=True)
class Start:
    """The lease on the run folder and the checkpoint to resume from."""

    lease: Lease
    checkpoint: Checkpoint | None
    activity: Activity = field(default_factory=Activity)
    pass_over: frozenset[int] = frozenset()
    """Positions of batches that were bad repeatedly."""
    dtype: torch.dtype | None = None
    """Format of masters, gradients and computation if not the job's, for verification."""

    @property
    def position(self) -> int:
        """The first sample of the global stream to read."""
        return 0 if self.checkpoint is None else self.checkpoint.facts.position

    @property
    def step(self) -> int | None:
        """The last saved step."""
        return None if self.checkpoint is None else self.checkpoint.facts.step

    def cursors(self) -> dict[int, Cursor] | None:
        """Where a stream continues, shard by shard."""
        return None if self.checkpoint is None else saved_cursors(self.checkpoint)
