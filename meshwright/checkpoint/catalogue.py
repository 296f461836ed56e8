"""The checkpoints of a run folder: which are complete, which is newest, which may go."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from meshwright.atomic import sync
from meshwright.checkpoint.lease import take_away
from meshwright.checkpoint.reading import Checkpoint, Damaged
from meshwright.errors import UserError
from meshwright.reading import Unfit, read_object


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> Iterator[Checkpoint | Damaged]:
    """A run's checkpoints, newest first; in place of one that is torn or foreign, what is wrong with it."""
    root = Path(run) / "checkpoints"
    paths = sorted(root.glob("step-*"), reverse=True) if root.is_dir() else []
    for path in paths:
        try:
            yield Checkpoint.open(path)
        except Damaged as damage:
            damage.path = path
            if os.path.lexists(path):  # else a training removed it as one that need not be kept
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
    """The newest complete checkpoint whose weights are as they were written; those passed over are named."""
    damages = []
    for found in checkpoints(run):
        try:
            if isinstance(found, Damaged):
                raise found
            found.verify(group="model")
        except Damaged as damage:
            damages.append(str(damage))
            continue
        sys.stderr.write("".join(f"passed over: {report}\n" for report in damages))
        return found
    raise _none(run, damages)


def _none(run: Path, damages: Sequence[str]) -> UserError:
    report = f" ({damages[0]})" if damages else ""
    remedy = "let its training save one first"
    if (target := backup_target(run)) is not None:
        remedy = f"meshwright checkpoint restore {run} brings one back from {target}"
    return UserError(f"{run} holds no complete checkpoint under checkpoints/{report}; {remedy}")


def backup_target(run: Path) -> str | None:
    """Where a run's checkpoints were copied to, as its folder tells."""
    try:
        section = read_object(Path(run) / "job.resolved.json").get("checkpoint")
    except (OSError, Unfit):
        return None
    target = section.get("backup_to") if isinstance(section, dict) else None
    return target if isinstance(target, str) else None


def surplus(
    run: Path, keep_last: int, keep_every: int | None, *, damaged: bool = False, verify: bool = False
) -> list[Path]:
    """The complete checkpoints that need not be kept, neither among the newest nor at kept steps; torn or foreign ones
    only where asked for. To verify reads those that stay, and one whose bytes changed takes no other's place."""
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
    """Of the steps of complete checkpoints, newest first, those that are neither among the newest nor kept for good."""
    return [step for step in steps[keep_last:] if not keep_every or step % keep_every]


def bring_into_sight(folder: Path, final: Path) -> None:
    """Give a complete checkpoint its name; fails before anything is touched where the folder was taken away."""
    if final.exists():  # an earlier attempt's, which was found damaged
        own = final.with_name(f".removed-new-{final.name}-{os.getpid()}")
        folder.rename(own)
        take_away(final)
        folder = own
    folder.rename(final)
    sync(final.parent)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each at once."""
    for path in paths:
        take_away(path)
