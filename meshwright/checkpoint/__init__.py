"""Durable state of a run: checkpoints that are whole or absent, and that any layout can read."""

from meshwright.checkpoint.backup import require_backup
from meshwright.checkpoint.catalogue import checkpoint_path, checkpoints, newest, remove, surplus
from meshwright.checkpoint.keeper import Keeper
from meshwright.checkpoint.lease import Fenced, Lease
from meshwright.checkpoint.reading import Checkpoint, Damaged, differences
from meshwright.checkpoint.records import Facts, Part, State
from meshwright.checkpoint.weights import load_weights, require_shapes

__all__ = [
    "Checkpoint",
    "Damaged",
    "Facts",
    "Fenced",
    "Keeper",
    "Lease",
    "Part",
    "State",
    "checkpoint_path",
    "checkpoints",
    "differences",
    "load_weights",
    "newest",
    "remove",
    "require_backup",
    "require_shapes",
    "surplus",
]
