"""The checkpoints of a run folder: which are complete, which is newest, which may go."""

from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.lease import take_away
from meshwright.checkpoint.reading import Checkpoint, Damaged
from meshwright.errors import UserError


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
            yield damage


def newest(run: Path) -> Checkpoint:
    """The newest complete checkpoint."""
    damages = []
    for found in checkpoints(run):
        if isinstance(found, Checkpoint):
            return found
        damages.append(str(found))
    told = f" ({damages[0]})" if damages else ""
    raise UserError(f"{run} holds no complete checkpoint under checkpoints/{told}; let its training save one first")


def surplus(run: Path, keep_last: int, keep_every: int | None) -> list[Checkpoint]:
    """The complete checkpoints that need not be kept: neither among the newest nor at kept steps."""
    complete = [found for found in checkpoints(run) if isinstance(found, Checkpoint)]
    return [one for one in complete[keep_last:] if not keep_every or one.facts.step % keep_every]


def prune(run: Path, keep_last: int, keep_every: int | None) -> list[Path]:
    """Remove the surplus; what is torn or foreign is left alone."""
    paths = [one.path for one in surplus(run, keep_last, keep_every)]
    for path in paths:
        take_away(path)
    return paths
