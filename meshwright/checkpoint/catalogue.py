"""The checkpoints of a run folder: which are complete, which is newest, which may go."""

from collections.abc import Iterable, Iterator
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
            damage.path = path
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


def surplus(run: Path, keep_last: int, keep_every: int | None, *, damaged: bool = False) -> list[Path]:
    """The complete checkpoints that need not be kept, neither among the newest nor at kept steps; torn or foreign ones
    only where asked for."""
    found = list(checkpoints(run))
    complete = [one for one in found if isinstance(one, Checkpoint)]
    paths = [one.path for one in complete[keep_last:] if not keep_every or one.facts.step % keep_every]
    return paths + [one.path for one in found if isinstance(one, Damaged) and damaged]


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each at once."""
    for path in paths:
        take_away(path)
