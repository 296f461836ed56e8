"""A second copy of every checkpoint, anywhere fsspec can write (a disk, an object store), and how to restore it."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshwright.atomic import disk_refusal, sync
from meshwright.checkpoint.catalogue import bring_into_sight, checkpoint_path, spare_steps
from meshwright.checkpoint.lease import RESTORING
from meshwright.checkpoint.reading import Checkpoint, Damaged, parse_manifest
from meshwright.checkpoint.shares import MANIFEST
from meshwright.checkpoint.store import Store, refused_in_a_sentence
from meshwright.errors import UserError

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
    store = Store.open(target)
    with refused_in_a_sentence(target, "written"):
        store.ask(lambda system: system.makedirs(store.root, exist_ok=True))
    if not resume and any(found.complete for found in _backups(run, store)):
        raise UserError(
            f"checkpoint.backup_to = {target} holds checkpoints of another run named {run.resolve().name}; give "
            "run.folder another name, or add --resume to continue that run"
        )


def back_up(checkpoint: Path, store: Store) -> str:
    """Copy a checkpoint to TARGET/RUN/STEP, the manifest last; one that is there already stays."""
    folder = f"{_folder(store, checkpoint.parent.parent)}/{checkpoint.name}"
    manifest = (checkpoint / MANIFEST).read_bytes()
    address = str(store.system.unstrip_protocol(folder))
    match store.read_small(f"{folder}/{MANIFEST}"):
        case None:
            store.retry(lambda system: system.makedirs(folder, exist_ok=True))
        case stored if stored == manifest:  # which names the hash of every other file
            return address
        case _:  # of a step that was repeated; a mix of both would be useless
            store.retry(lambda system: system.rm_file(f"{folder}/{MANIFEST}"))
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == MANIFEST)
    for file in files:
        store.upload(file, f"{folder}/{file.name}")
    return address


def backups(run: Path, target: str) -> list[Backup]:
    """The copies of a run's checkpoints, newest first."""
    return _backups(run, Store.open(target))


def _backups(run: Path, store: Store) -> list[Backup]:
    store.system.invalidate_cache()
    found = []
    with refused_in_a_sentence(store.target, "read"):
        for place in store.entries(_folder(store, run)):
            if step := _STEP.fullmatch(place.rpartition("/")[2]):
                complete = store.retry(lambda system: system.exists(f"{place}/{MANIFEST}"))  # noqa: B023
                found.append(Backup(int(step[1]), place, bool(complete)))
    return sorted(found, key=lambda one: -one.step)


def prune_backups(run: Path, store: Store, keep_last: int, keep_every: int | None) -> list[int]:
    """Remove copies by the same retention rule as the run folder, and incomplete ones older than the newest."""
    found = _backups(run, store)
    complete = [one.step for one in found if one.complete]
    spare = set(spare_steps(complete, keep_last, keep_every))
    gone = [one for one in found if (one.step in spare if one.complete else complete and one.step < complete[0])]
    for one in gone:
        if one.complete:  # from here on everyone sees it as incomplete
            store.ask(lambda system: system.rm_file(f"{one.place}/{MANIFEST}"))  # noqa: B023
        store.ask(lambda system: system.rm(one.place, recursive=True))  # noqa: B023
    return [one.step for one in gone]


def restore(run: Path, target: str) -> tuple[Checkpoint | None, list[str]]:
    """Restore the newest intact copy into the run folder, if there is one, and report what is wrong with newer ones."""
    passed_over: list[str] = []
    store = Store.open(target)
    for one in _backups(run, store):
        try:
            return _restored(run, store, one), passed_over
        except Damaged as damage:
            passed_over.append(f"the backup {damage}")
    return None, passed_over


def _restored(run: Path, store: Store, one: Backup) -> Checkpoint:
    final = checkpoint_path(run, one.step)
    beside = final.parent / f"{RESTORING}{one.step}"
    draft = beside / final.name
    shutil.rmtree(beside, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        if not one.complete:
            raise Damaged(f"{draft} has no {MANIFEST}: the copy is incomplete")
        with refused_in_a_sentence(store.target, "read"):
            store.download(f"{one.place}/{MANIFEST}", draft / MANIFEST)
            # Only what the manifest names, whose names are checked: a store may hold anything else.
            for name in parse_manifest(draft).files:
                try:
                    store.download(f"{one.place}/{name}", draft / name)
                except FileNotFoundError:
                    raise Damaged(f"{draft / name} is missing") from None
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


def _folder(store: Store, run: Path) -> str:
    return f"{store.root.rstrip('/')}/{run.resolve().name}"
