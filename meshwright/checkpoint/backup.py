"""A second copy of every checkpoint, in any place fsspec knows: another disk, an object store."""

from pathlib import Path
from typing import Any

from meshwright.checkpoint.shares import MANIFEST
from meshwright.errors import UserError


def require_backup(target: str) -> None:
    """Refuse a place that cannot be reached, before anything is trained."""
    system, root = _open(target)
    try:
        system.makedirs(root, exist_ok=True)
    except Exception as error:  # every store has errors of its own
        raise UserError(
            f"checkpoint.backup_to = {target} cannot be written ({error}); mend it or leave it out"
        ) from None


def back_up(checkpoint: Path, target: str) -> str:
    """Copy a checkpoint to TARGET/RUN/STEP, the manifest last, so that a copy without one is known to be torn."""
    system, root = _open(target)
    place = f"{root.rstrip('/')}/{checkpoint.parent.parent.resolve().name}/{checkpoint.name}"
    system.makedirs(place, exist_ok=True)
    files = sorted((entry.name for entry in checkpoint.iterdir()), key=lambda name: name == MANIFEST)
    for name in files:
        system.put_file(str(checkpoint / name), f"{place}/{name}")
    return str(system.unstrip_protocol(place))


def _open(target: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"checkpoint.backup_to = {target} cannot be opened ({error}); mend it or leave it out"
        ) from None
    return system, str(root)
