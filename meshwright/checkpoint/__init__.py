"""Durable state of a run: checkpoints that are written atomically and that any layout can read."""

from meshwright.checkpoint.backup import Backup, backups, require_backup, restore
from meshwright.checkpoint.base import Rows, base_fingerprint, first_rows, packed_weights, require_base, whisper_start
from meshwright.checkpoint.catalogue import (
    backup_target,
    checkpoint_path,
    checkpoints,
    newest,
    newest_weights,
    open_checkpoint,
    remove,
    surplus,
)
from meshwright.checkpoint.hf_files import (
    GENERATION,
    Generation,
    chat_template_of,
    generation_of,
    keep_companions,
    learned_generation,
)
from meshwright.checkpoint.hf_import import import_weights
from meshwright.checkpoint.hf_read import HfWeights
from meshwright.checkpoint.hf_write import Export, Exported
from meshwright.checkpoint.lease import Fenced, Lease
from meshwright.checkpoint.peft import PeftAdapter, export_adapter
from meshwright.checkpoint.reading import Checkpoint, Damaged, differences
from meshwright.checkpoint.records import Facts, Part, State
from meshwright.checkpoint.retries import tries
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.weights import PREFERENCE, StoredWeights, load_hf_weights, load_weights, require_shapes

__all__ = [
    "GENERATION",
    "PREFERENCE",
    "Backup",
    "Checkpoint",
    "Damaged",
    "Export",
    "Exported",
    "Facts",
    "Fenced",
    "Generation",
    "HfWeights",
    "Lease",
    "Part",
    "PeftAdapter",
    "Rows",
    "Saver",
    "State",
    "StoredWeights",
    "backup_target",
    "backups",
    "base_fingerprint",
    "chat_template_of",
    "checkpoint_path",
    "checkpoints",
    "differences",
    "export_adapter",
    "first_rows",
    "generation_of",
    "import_weights",
    "keep_companions",
    "learned_generation",
    "load_hf_weights",
    "load_weights",
    "newest",
    "newest_weights",
    "open_checkpoint",
    "packed_weights",
    "remove",
    "require_backup",
    "require_base",
    "require_shapes",
    "restore",
    "surplus",
    "tries",
    "whisper_start",
]
