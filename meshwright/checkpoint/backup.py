"""A second copy of every checkpoint, anywhere fsspec can write (a disk, an object store), and how to restore it."""

import errno
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.atomic import disk_refusal, sync
from meshwright.checkpoint.catalogue import bring_into_sight, checkpoint_path, spare_steps
from meshwright.checkpoint.lease import RESTORING
from meshwright.checkpoint.reading import Checkpoint, Damaged, parse_manifest
from meshwright.checkpoint.shares import MANIFEST
from meshwright.errors import UserError

PATIENCE_S = 60.0
"""How long a store may keep failing on one file before the copy is abandoned."""
_LASTING = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR")
)
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Backup:
    """A copy of one checkpoint; the manifest is copied last, so a copy without one is known to be incomplete."""

    step: int
    place: str
    complete: bool


def require_backup(target: str, run: Path, *, resume: bool) -> None:
    """Refuse a place that cannot be reached, before anything is trained, and one where a new run would meet another's
    copies."""
    system, root = _open(target)
    with _refused(target, "written"):
        system.makedirs(root, exist_ok=True)
    if not resume and any(found.complete for found in backups(run, target)):
        raise UserError(
            f"checkpoint.backup_to = {target} holds checkpoints of another run named {run.resolve().name}; give "
            "run.folder another name, or add --resume to continue that run"
        )


def back_up(checkpoint: Path, target: str) -> str:
    """Copy a checkpoint to TARGET/RUN/STEP, the manifest last."""
    system, root = _open(target)
    place = f"{_folder(root, checkpoint.parent.parent)}/{checkpoint.name}"
    system.makedirs(place, exist_ok=True)
    if system.exists(f"{place}/{MANIFEST}"):  # of a step that was repeated; a mix of both would be useless
        system.rm_file(f"{place}/{MANIFEST}")
    files = sorted((entry.name for entry in checkpoint.iterdir()), key=lambda name: name == MANIFEST)
    for name in files:
        _patiently(lambda: _put(system, checkpoint / name, f"{place}/{name}"))  # noqa: B023
    return str(system.unstrip_protocol(place))


def backups(run: Path, target: str) -> list[Backup]:
    """The copies of a run's checkpoints, newest first."""
    system, root = _open(target)
    system.invalidate_cache()
    found = []
    with _refused(target, "read"):
        for place in _entries(system, _folder(root, run)):
            if step := _STEP.fullmatch(place.rpartition("/")[2]):
                found.append(Backup(int(step[1]), place, bool(system.exists(f"{place}/{MANIFEST}"))))
    return sorted(found, key=lambda one: -one.step)


def prune_backups(run: Path, target: str, keep_last: int, keep_every: int | None) -> list[int]:
    """Remove copies by the same retention rule as the run folder, and incomplete ones older than the newest."""
    system, _ = _open(target)
    found = backups(run, target)
    complete = [one.step for one in found if one.complete]
    spare = set(spare_steps(complete, keep_last, keep_every))
    gone = [one for one in found if (one.step in spare if one.complete else complete and one.step < complete[0])]
    for one in gone:
        if one.complete:  # from here on everyone sees it as incomplete
            system.rm_file(f"{one.place}/{MANIFEST}")
        system.rm(one.place, recursive=True)
    return [one.step for one in gone]


def restore(run: Path, target: str) -> tuple[Checkpoint | None, list[str]]:
    """Restore the newest intact copy into the run folder, if there is one, and report what is wrong with newer ones."""
    passed_over: list[str] = []
    for one in backups(run, target):
        try:
            return _restored(run, target, one), passed_over
        except Damaged as damage:
            passed_over.append(f"the backup {damage}")
    return None, passed_over


def _restored(run: Path, target: str, one: Backup) -> Checkpoint:
    system, _ = _open(target)
    final = checkpoint_path(run, one.step)
    beside = final.parent / f"{RESTORING}{one.step}"
    draft = beside / final.name
    shutil.rmtree(beside, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        if not one.complete:
            raise Damaged(f"{draft} has no {MANIFEST}: the copy is incomplete")
        with _refused(target, "read"):
            _patiently(lambda: system.get_file(f"{one.place}/{MANIFEST}", str(draft / MANIFEST)))
            # Only what the manifest names, whose names are checked: a store may hold anything else.
            for name in parse_manifest(draft).files:
                if not system.exists(f"{one.place}/{name}"):
                    raise Damaged(f"{draft / name} is missing")
                _patiently(lambda: system.get_file(f"{one.place}/{name}", str(draft / name)))  # noqa: B023
        Checkpoint.open(draft).verify()
        for made in (*draft.iterdir(), draft):
            sync(made)
        bring_into_sight(draft, final)
    except Damaged as damage:
        raise Damaged(str(damage).replace(str(draft), one.place)) from None
    except OSError as error:
        raise disk_refusal(str(final), error) or error from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Checkpoint.open(final)


def _put(system: Any, file: Path, place: str) -> None:
    system.put_file(str(file), place)
    system.invalidate_cache()
    if (stored := system.info(place)["size"]) != file.stat().st_size:
        raise OSError(f"{place} has {stored} bytes, but {file.stat().st_size} were sent")


def _patiently(act: Callable[[], None]) -> None:
    """Run an operation on a store, and retry transient failures for up to PATIENCE_S."""
    until, wait_s = time.monotonic() + PATIENCE_S, 0.2
    while True:
        try:
            return act()
        except Exception as error:  # every store raises its own errors
            if getattr(error, "errno", None) in _LASTING or time.monotonic() + wait_s > until:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 5.0)


def _folder(root: str, run: Path) -> str:
    return f"{root.rstrip('/')}/{run.resolve().name}"


def _entries(system: Any, folder: str) -> list[str]:
    try:
        return [str(place).rstrip("/") for place in system.ls(folder, detail=False)]
    except FileNotFoundError:
        return []


@contextmanager
def _refused(target: str, what: str) -> Iterator[None]:
    """Every store raises its own errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"checkpoint.backup_to = {target} cannot be {what} ({error}); fix it or leave it out") from None


def _open(target: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    with _refused(target, "opened"):  # some stores connect here
        system, root = url_to_fs(target)
    return system, str(root)
