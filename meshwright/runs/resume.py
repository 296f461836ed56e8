"""How a run's process begins: at the first step, or at the newest intact checkpoint."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.checkpoint import Checkpoint, Damaged, checkpoints, require_shapes, restore
from meshwright.data import Corpus, read_anew
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.model.adapter import is_frozen
from meshwright.parallel import World
from meshwright.runs.change_job import change_job
from meshwright.runs.folder import RunFolder
from meshwright.runs.rank_zero import from_rank_zero, on_rank_zero
from meshwright.runs.sinks import require_sinks
from meshwright.train import Start, fingerprint

# What determines which samples come next, and the format of the saved optimizer states.
_FIXED = (
    ("run", "seed"),
    ("batch", "sequence_length"),
    ("data", "weights"),
    ("data", "stages"),
    ("data", "packing"),
    ("model", "adapter"),
    ("optimizer", "name"),
    ("precision", "optimizer_states"),
)


@dataclass(frozen=True)
class Found:
    """What to resume from."""

    checkpoint: Checkpoint | None = None
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer checkpoints."""
    restored_from: str | None = None
    """The backup it was restored from, if any."""


def find_checkpoint(run: Path, world: World, backup_to: str | None = None) -> Found:
    """The newest checkpoint that is intact in every byte; if the run folder has none, the backup's.

    All ranks call this together and share the reading.
    """
    found = list(checkpoints(run)) if world.rank == 0 else []
    listed = [str(one) if isinstance(one, Damaged) else one.path for one in found]
    passed_over: list[str] = []
    for one in from_rank_zero(world, listed):
        if isinstance(one, Path):
            damages = _everyones(world, _damage(one, world))
            if not damages:
                return Found(Checkpoint.open(one), tuple(passed_over))
            passed_over.append(damages[0])
        else:
            passed_over.append(one)
    if backup_to is None:
        return Found(None, tuple(passed_over))
    fetched = on_rank_zero(world, lambda: _fetched(run, backup_to))
    path, more = from_rank_zero(world, fetched or (None, []))
    checkpoint = None if path is None else Checkpoint.open(path)
    return Found(checkpoint, (*passed_over, *more), None if path is None else backup_to)


def _fetched(run: Path, backup_to: str) -> tuple[Path | None, list[str]]:
    checkpoint, passed_over = restore(run, backup_to)
    return None if checkpoint is None else checkpoint.path, passed_over


def require_same_run(job: Job, corpus: Corpus, checkpoint: Checkpoint) -> None:
    """Refuse to continue with different data, optimizer or model, which would not be a continuation."""
    before, now, default = checkpoint.job(), job.model_dump(mode="json"), Job().model_dump(mode="json")
    if not checkpoint.facts.data:
        raise UserError(
            f"{checkpoint.path} was imported, so there is no training to continue; start one with "
            f'model.init_from = "{before.get("model", {}).get("init_from")}" in a new run.folder'
        )
    for section, name in _FIXED:
        # Fields that an older checkpoint does not have had their default values.
        was, given = before.get(section, {}).get(name, default[section][name]), now[section][name]
        if was != given:
            raise UserError(
                f"{section}.{name} = {given} cannot continue {checkpoint.path}, which was saved with {was}; restore it "
                "or start a new run"
            )
    if checkpoint.facts.data != fingerprint(corpus):
        raise UserError(
            f"data.sources = {list(job.data.sources)} does not produce the tokens {checkpoint.path} was trained on"
            f"{read_anew(job.data)}; restore them or start a new run"
        )
    with torch.device("meta"):
        parameters = dict(build_architecture(job.model).model.named_parameters())
    trained = {name: tuple(p.shape) for name, p in parameters.items() if not is_frozen(job.model, name)}
    require_shapes(checkpoint, trained, whole=True)


def require_resumable(run: Path, job: Job, corpus: Corpus) -> None:
    """Raise what `find_checkpoint` and `require_same_run` would, as far as possible without reading everything."""
    RunFolder.open(run)
    sound = next((one for one in checkpoints(run) if isinstance(one, Checkpoint)), None)
    if sound is not None:
        require_same_run(job, corpus, sound)


def begin(folder: RunFolder, job: Job, found: Found, console: Console) -> Start:
    """Claim the folder for a new attempt; record and print what it starts from."""
    require_sinks(job)
    lease, checkpoint = folder.begin_attempt(), found.checkpoint
    for damage in found.passed_over:
        folder.event("checkpoint_refused", error=damage)
        console.print(f"skipped: {damage}", markup=False, highlight=False, soft_wrap=True)
    if checkpoint is not None and found.restored_from is not None:
        folder.event("restored", step=checkpoint.facts.step, backup=found.restored_from)
        report = f"step {checkpoint.facts.step} restored from {found.restored_from}"
        console.print(report, markup=False, highlight=False, soft_wrap=True)
    if lease.attempt or checkpoint is not None:
        changed = change_job(folder, job)
        step = 0 if checkpoint is None else checkpoint.facts.step
        place = None if checkpoint is None else str(checkpoint.path.relative_to(folder.path))
        folder.event("resume", step=step, attempt=lease.attempt, path=place, changed=changed)
        report = "from the start, as there is no complete checkpoint" if checkpoint is None else f"from step {step}"
        console.print(f"resuming {report} (attempt {lease.attempt})", markup=False, highlight=False)
        if step >= job.run.steps:
            more = f"all run.steps = {job.run.steps} are done; to train on, resume with --set run.steps={2 * step}"
            console.print(more, markup=False, highlight=False, soft_wrap=True)
    folder.describe_attempt(lease.attempt, sys.argv)
    return Start(lease, checkpoint)


def _damage(path: Path, world: World) -> str | None:
    try:
        Checkpoint.open(path).verify(world.rank, world.size)
    except Damaged as damage:
        return str(damage)
    return None


def _everyones(world: World, damage: str | None) -> list[str]:
    report = [damage]
    if world.size > 1:
        report = [None] * world.size
        dist.all_gather_object(report, damage)
    return [one for one in report if one is not None]
