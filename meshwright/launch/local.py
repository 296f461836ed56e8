"""A training run in this process: data, model, run folder, loop, weights."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from meshwright.checkpoint import save_weights
from meshwright.data import Corpus, prepare
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.launch.folder import RunFolder
from meshwright.launch.signals import stop_on_signal
from meshwright.model import parameter_count
from meshwright.parallel import build
from meshwright.train import (
    ConsoleProgress,
    Outcome,
    Training,
    choose_device,
    device_name,
    emulates_bf16,
    prepare_device,
    require_enough_text,
)


@dataclass(frozen=True)
class Finished:
    """A run that ended in good order."""

    folder: Path
    outcome: Outcome


def run_local(loaded: LoadedJob, console: Console, on_end: Callable[[Path], object] = lambda path: None) -> Finished:
    """Train a job on this machine's device; what can be refused is refused before anything is written.

    However the run ends, `on_end` is called with its folder (to write the report, which lives in a higher room).
    """
    job = loaded.job
    device = choose_device(job)
    path = run_path(loaded)
    RunFolder.require_free(path)
    _require_disk(job, path)
    prepare_device(job, device)
    with console.status("preparing data") as status:
        corpus = prepare(job.data, job.model.vocab_size, lambda stage, share: status.update(f"{stage} {share:.0%}"))
    require_enough_text(job, corpus, device)
    folder = RunFolder.create(path, loaded.raw, job.model_dump(mode="json"), sys.argv)
    console.print(_headline(job, corpus, device, path), markup=False, highlight=False, soft_wrap=True)
    try:
        if corpus.tokenizer is not None:
            folder.write("tokenizer.json", corpus.tokenizer.to_json())
        finished = _train(job, corpus, device, folder, path, console)
    except BaseException as error:
        _record_failure(folder, error, on_end)
        raise
    on_end(path)
    return finished


def run_path(loaded: LoadedJob) -> Path:
    """Where the run will live: run.folder, or a new folder named after the job and the time."""
    if loaded.job.run.folder is not None:
        return Path(loaded.job.run.folder)
    return Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _train(job: Job, corpus: Corpus, device: torch.device, folder: RunFolder, path: Path, console: Console) -> Finished:
    try:
        with stop_on_signal() as stop:
            model, weights = build(job, device)
            with ConsoleProgress(job, console) as progress:
                outcome = Training(job, corpus, model, weights, folder, progress).run(stop)
            saved = save_weights(path, outcome.step, weights.masters)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{device_name(device)} ran out of memory with batch.micro_batch = {job.batch.micro_batch} and "
            f"batch.sequence_length = {job.batch.sequence_length}; lower one of them or choose a smaller model"
        ) from error
    folder.event("weights", step=outcome.step, path=str(saved.relative_to(path)))
    folder.event("stop", reason=outcome.reason, step=outcome.step, signal=stop.signal)
    return Finished(path, outcome)


def _record_failure(folder: RunFolder, error: BaseException, on_end: Callable[[Path], object]) -> None:
    # Where the failure is a full disk these writes fail too; the first error is the one the user must see.
    with contextlib.suppress(UserError):
        folder.event("stop", reason="failed", error=f"{type(error).__name__}: {error}")
        on_end(folder.path)


def _require_disk(job: Job, path: Path) -> None:
    """Refuse to start a run whose final weights would not fit on the disk."""
    needed = 4 * parameter_count(job.model)
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"run.folder = {path}: the disk has {free / 1e9:.2f} GB free and the weights need {needed / 1e9:.2f} GB; "
            f"free space or set run.folder to another disk"
        )


def _headline(job: Job, corpus: Corpus, device: torch.device, path: Path) -> str:
    parts: list[Any] = [
        f"{parameter_count(job.model):,} parameters",
        f"{len(corpus.train):,} training tokens" if corpus.tokenizer else "synthetic tokens",
        f"{job.tokens_per_step:,} tokens a step ({job.batch.global_batch} × {job.batch.sequence_length}, "
        f"accumulation {job.accumulation})",
        f"{job.precision.compute} on {device_name(device)}",
        f"run folder {path}",
    ]
    slow = " · note: this CPU has no bf16 arithmetic, fp32 is far faster here"
    return " · ".join(parts) + (slow if emulates_bf16(job, device) else "")
