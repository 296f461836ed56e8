"""The checkpoints of a run folder: which are complete, which is newest, which can be removed."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from meshwright.atomic import sync
from meshwright.checkpoint.lease import take_away
from meshwright.checkpoint.reading import Checkpoint, Damaged
from meshwright.errors import UserError
from meshwright.reading import REHEARSAL, Unfit, read_object


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> Iterator[Checkpoint | Damaged]:
    """A run's checkpoints, newest first; in place of an incomplete or foreign one, what is wrong with it."""
    root = Path(run) / "checkpoints"
    paths = list(root.glob("step-*")) if root.is_dir() else []
    # From step 100,000,000 on a name has more digits.
    for path in sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True):
        try:
            yield Checkpoint.open(path)
        except Damaged as damage:
            damage.path = path
            if os.path.lexists(path):  # otherwise a training run removed it by the retention rule
                yield damage


def newest(run: Path) -> Checkpoint:
    """The newest complete checkpoint."""
    damages = []
    for found in checkpoints(run):
        if isinstance(found, Checkpoint):
            return found
        damages.append(str(found))
    raise _none(run, damages)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by its folder, or the newest complete one of a run folder."""
    if not path.name:  # the folder one stands in
        path = path.absolute()
    if path.name.startswith("step-") and path.is_dir():
        return Checkpoint.open(path)
    if not ((path / "checkpoints").is_dir() or (path / "job.resolved.json").is_file()):
        raise UserError(f"{path} is neither a run folder nor a checkpoint; give one of them")
    return newest(path)


def newest_weights(run: Path) -> Checkpoint:
    """The newest complete checkpoint whose weights match their hashes; skipped ones are reported."""
    damages = []
    for found in checkpoints(run):
        try:
            if isinstance(found, Damaged):
                raise found
            found.verify(group="model")
        except Damaged as damage:
            damages.append(str(damage))
            continue
        sys.stderr.write("".join(f"skipped: {report}\n" for report in damages))
        return found
    raise _none(run, damages)


def _none(run: Path, damages: Sequence[str]) -> UserError:
    report = f" ({damages[0]})" if damages else ""
    remedy = "wait until training has saved one"
    if os.path.lexists(run / REHEARSAL):
        remedy = "it is a rehearsal, which saves none: train its job first"
    if (target := backup_target(run)) is not None:
        remedy = f"meshwright checkpoint restore {run} restores one from {target}"
    return UserError(f"{run} holds no complete checkpoint under checkpoints/{report}; {remedy}")


def backup_target(run: Path) -> str | None:
    """Where a run's checkpoints were copied to, as recorded in its folder."""
    try:
        section = read_object(Path(run) / "job.resolved.json").get("checkpoint")
    except (OSError, Unfit):
        return None
    target = section.get("backup_to") if isinstance(section, dict) else None
    return target if isinstance(target, str) else None


def surplus(
    run: Path, keep_last: int, keep_every: int | None, *, damaged: bool = False, verify: bool = False
) -> list[Path]:
    """The complete checkpoints that need not be kept, neither among the newest nor at kept steps; incomplete or foreign
    ones only on request. `verify` reads those that stay, and one whose bytes changed does not count as kept."""
    complete: dict[int, Path] = {}
    broken: list[Path] = []
    for one in checkpoints(run):
        try:
            if isinstance(one, Damaged):
                raise one
            step = one.facts.step
            if verify and step not in spare_steps([*complete, step], keep_last, keep_every):
                one.verify()
            complete[step] = one.path
        except Damaged:
            broken.append(one.path)
    paths = [complete[step] for step in spare_steps(list(complete), keep_last, keep_every)]
    return paths + (broken if damaged else [])


def spare_steps(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Of the steps of complete checkpoints, newest first, those that are neither among the newest nor kept
    permanently."""
    return [step for step in steps[keep_last:] if not keep_every or step % keep_every]


def bring_into_sight(folder: Path, final: Path) -> None:
    """Give a complete checkpoint its name; fails before touching anything if the run was taken over."""
    if final.exists():  # from an earlier attempt, and found damaged
        own = final.with_name(f".removed-new-{final.name}-{os.getpid()}")
        folder.rename(own)
        take_away(final)
        folder = own
    folder.rename(final)
    sync(final.parent)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each atomically."""
    for path in paths:
        take_away(path)
