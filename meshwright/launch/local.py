"""A training run in this process: data, model, run folder, loop, weights; alone, or as one rank's part of it."""

import contextlib
import gc
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from meshwright.checkpoint import Keeper, backups, require_backup, tries
from meshwright.data import Corpus, Loader, StreamLoader, training_index
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.launch.begin import Found, Start, begin, find_checkpoint, require_same_run, rewound
from meshwright.launch.folder import RunFolder
from meshwright.launch.gather import from_rank_zero, on_rank_zero
from meshwright.launch.huggingface import keep_start, require_start
from meshwright.launch.links import try_links
from meshwright.launch.signals import stop_on_signal
from meshwright.launch.sinks import recorded_everywhere, require_sinks
from meshwright.layout import ranks_of, require_layout
from meshwright.model import count_parameters
from meshwright.parallel import World, build, host_buffer
from meshwright.train import (
    AsynchronousTraining,
    ConsoleProgress,
    Outcome,
    Progress,
    Recorder,
    Rewind,
    Silent,
    Training,
    choose_attention,
    choose_device,
    device_name,
    emulated_format,
    make_training,
    memory_errors_explained,
    open_corpus,
    prepare_device,
    require_enough_text,
    training_loader,
)

OnEnd = Callable[[Path], object]
# What an optimizer keeps for most parameters, at least.
_MOMENTS = {"adamw": 2, "lion": 1, "muon": 1, "sgd": 0, "adafactor": 0}
_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
MOST_REWINDS = 8
"""After so many in one attempt to train, going back helps no more."""


@dataclass(frozen=True)
class Finished:
    """A run that ended in good order."""

    folder: Path
    outcome: Outcome
    signal: str | None = None
    """What asked it to stop, if anything did."""


class Stop(Protocol):
    """Says whether the run was asked to stop, and by what."""

    signal: str | None

    def __call__(self) -> bool:
        """Asked after every step."""


def run_local(
    loaded: LoadedJob,
    console: Console,
    on_end: OnEnd = lambda path: None,
    resume: bool = False,
    dtype: torch.dtype | None = None,
) -> Finished:
    """Train a job in this process alone; what can be refused is refused before anything is written.

    With `resume` a run folder that is there is continued. However the run ends, `on_end` is called with its folder (to
    write the report, which lives in a higher room). `dtype` overrides the formats of masters and computation.
    """
    job = loaded.job
    if (needed := ranks_of(job.layout)) > 1:
        raise UserError(f"layout needs {needed} ranks; add --nproc {needed} or start it with torchrun")
    require_layout(job, 1)
    world = World(choose_device(job))
    path = run_path(loaded, resume)
    continues = resume and not RunFolder.is_free(path)
    if not continues:
        require_room(job, path, resume)
    prepare_device(job, world.device)
    corpus = prepare_data(job, console)
    require_enough_text(job, corpus, world)
    continues = continues or made_for_backup(loaded, path, resume)
    found = find_checkpoint(path, world, job.checkpoint.backup_to) if continues else Found()
    if found.checkpoint is not None:
        require_same_run(job, corpus, found.checkpoint)
    folder = RunFolder.open(path) if continues else create_folder(loaded, path)
    start = replace(begin(folder, job, found, console), dtype=dtype)
    folder.require_written()
    print_headline(job, corpus, world, folder, console)
    try:
        with stop_on_signal() as stop:
            outcome = train_with_rewinds(folder, job, corpus, world, console, stop, start)
    except BaseException as error:
        record_failure(folder, error, f"{type(error).__name__}: {error}", on_end)
        raise
    on_end(path)
    return Finished(path, outcome, stop.signal)


def run_path(loaded: LoadedJob, resume: bool = False) -> Path:
    """Where the run will live: run.folder, or a new folder named after the job and the time."""
    if resume and loaded.job.run.folder is None:
        raise UserError("--resume needs run.folder, which the job does not set; set it or give the run folder as JOB")
    if loaded.job.run.folder is not None:
        return Path(loaded.job.run.folder)
    return Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def made_for_backup(loaded: LoadedJob, path: Path, resume: bool) -> bool:
    """Whether a run whose folder is lost goes on from copies of its checkpoints; it then has a folder again."""
    target = loaded.job.checkpoint.backup_to
    if not resume or target is None or not any(one.complete for one in backups(path, target)):
        return False
    create_folder(loaded, path)
    return True


def require_room(job: Job, path: Path, resume: bool = False) -> None:
    """Refuse a run folder that is taken, first weights that are not whole, a disk too small for the last checkpoint, a
    backup out of reach."""
    RunFolder.require_free(path)
    require_sinks(job)
    require_start(job)
    if job.checkpoint.backup_to is not None:
        require_backup(job.checkpoint.backup_to, path, resume=resume)
    needed = count_parameters(job.model) * (4 + _MOMENTS[job.optimizer.name] * _BYTES[job.precision.optimizer_states])
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"run.folder = {path}: the disk has {free / 1e9:.2f} GB free and a checkpoint takes {needed / 1e9:.2f} GB; "
            f"free space or set run.folder to another disk"
        )


def prepare_data(job: Job, console: Console) -> Corpus:
    """The job's corpus, with a line on the console that follows its making."""
    with console.status("preparing data") as status:
        return open_corpus(job, lambda stage, share: status.update(f"{stage} {share:.0%}"))


def create_folder(loaded: LoadedJob, path: Path) -> RunFolder:
    """The run's folder with the job as it was written and as it was understood."""
    folder = RunFolder.create(path, loaded.raw, loaded.job.model_dump(mode="json"), sys.argv)
    keep_start(loaded.job, path)
    return folder


def train_with_rewinds(
    folder: RunFolder | None, job: Job, corpus: Corpus, world: World, console: Console, stop: Stop, start: Start
) -> Outcome:
    """Train, and where a step comes out bad and run.on_bad_step says so, go back to the last checkpoint and go on.

    The first time all data is read again, in case a machine erred; a batch that is bad twice is passed over.
    """
    bad: list[int] = []
    while True:
        try:
            return train_in(folder, job, corpus, world, console, stop, start)
        except Rewind as rewind:
            step, position = rewind.step, rewind.position
        start.pulse.begin()
        gc.collect()  # the old weights, before there are new ones
        bad.append(position)
        if len(bad) > MOST_REWINDS:
            raise UserError(
                f"step {step} came out bad after {MOST_REWINDS} rewinds; look at it with `meshwright replay "
                f"{start.lease.run} --step {step}`, lower optimizer.lr = {job.optimizer.lr} or change the data"
            )
        start = rewound(folder, job, world, console, start, step, [p for p in bad if bad.count(p) > 1])


def train_in(
    folder: RunFolder | None, job: Job, corpus: Corpus, world: World, console: Console, stop: Stop, start: Start
) -> Outcome:
    """Build, train and save the state; only rank 0 has a folder, the others keep silent."""
    loader = training_loader(job, corpus, world, start.position, start.cursors())
    try:
        with memory_errors_explained(job, world):
            loader.start()
            outcome = _build_and_train(folder, job, corpus, world, console, stop, start, loader)
    finally:
        loader.close()

    def end() -> None:
        assert folder is not None
        folder.require_written()
        folder.end_attempt()

    on_rank_zero(world, lambda: _record_end(folder, outcome, stop))
    for _ in tries(lambda: start.pulse.at("waiting for room on the disk")):
        if from_rank_zero(world, on_rank_zero(world, lambda: folder is None or folder.written())):
            break
    on_rank_zero(world, end)
    return outcome


def _record_end(folder: RunFolder | None, outcome: Outcome, stop: Stop) -> None:
    assert folder is not None
    stop()  # where another rank was asked first, the reason may have arrived here by now
    memory = {"peak_memory_bytes": outcome.peak_memory_bytes, "steady_memory_bytes": outcome.steady_memory_bytes}
    folder.event("stop", reason=outcome.reason, step=outcome.step, signal=stop.signal, **memory)


def _train(
    training: Training | AsynchronousTraining,
    job: Job,
    world: World,
    start: Start,
    recorder: Recorder,
    progress: Progress,
    stop: Stop,
    loader: Loader | StreamLoader,
) -> Outcome:
    """From the first weights or a checkpoint to the last step, which is saved."""
    keeper = Keeper(
        job,
        start.lease,
        recorder.event,
        progress.message,
        lambda size: host_buffer(size, torch.uint8, world.device),
        rank=world.rank,
        ranks=world.size,
        sums=world.sum_over_world,
        saved_step=None if start.checkpoint is None else start.checkpoint.facts.step,
        flush=recorder.flush,
        alive=lambda: start.pulse.at("waiting for room on the disk"),
    )
    training.attempt, training.pulse, training.pass_over = start.lease.attempt, start.pulse, start.pass_over
    training.keep(keeper)
    if start.checkpoint is not None:
        training.resume(start.checkpoint)
    try_links(world, recorder, progress, start.pulse)
    try:
        outcome = training.run(stop, loader)
    except Rewind:
        keeper.settle()
        raise
    except Exception:
        keeper.abandon()
        raise
    keeper.finish(outcome.step, training.capture)
    return outcome


def _build_and_train(
    folder: RunFolder | None,
    job: Job,
    corpus: Corpus,
    world: World,
    console: Console,
    stop: Stop,
    start: Start,
    loader: Loader | StreamLoader,
) -> Outcome:
    start.pulse.at("building the model")
    kernels = choose_attention(job, world, _attention_of(folder))
    engine, weights = build(job if start.checkpoint is None else _without_first_weights(job), world, start.dtype)
    if folder is None:
        silent = Silent()
        training = make_training(job, corpus, engine, weights, silent, silent, world)
        return _train(training, job, world, start, silent, silent, stop, loader)
    if corpus.tokenizer is not None:
        folder.write("tokenizer.json", corpus.tokenizer.to_json())
    if kernels is not None:
        folder.event("attention", **kernels)
    if (index := training_index(corpus, job.data, job.batch.sequence_length)) is not None:
        folder.event("packing", packing=job.data.packing, **asdict(index.shares), concatenate=asdict(index.running))
    everywhere = recorded_everywhere(folder, job, start.lease.attempt)
    with ConsoleProgress(job, console) as progress, everywhere as recorder:
        training = make_training(job, corpus, engine, weights, recorder, progress, world)
        training.watch_memory(folder.memory)
        folder.tell = progress.message
        return _train(training, job, world, start, recorder, progress, stop, loader)


def _attention_of(folder: RunFolder | None) -> dict[str, Any] | None:
    """What an earlier attempt of a run chose, as it recorded it."""
    chosen = folder.events("attention") if folder else []
    return {name: chosen[-1].get(name) for name in ("kernel", "groups", "milliseconds")} if chosen else None


def _without_first_weights(job: Job) -> Job:
    """A resumed run needs the folder it once started from no more."""
    return job.model_copy(update={"model": job.model.model_copy(update={"init_from": None})})


def record_failure(folder: RunFolder, error: BaseException, told: str, on_end: OnEnd) -> None:
    """End the record of a failed run, or of one that a second signal ended at once."""
    end = {"reason": "failed", "error": told}
    if isinstance(error, KeyboardInterrupt):
        end = {"reason": "interrupted", "error": "a second signal ended it at once, unsaved"}
    # Where the disk is the failure these writes fail too; the first error is the one the user must see.
    with contextlib.suppress(UserError, OSError):
        folder.event("stop", **end)
        wait_until_written(folder)
        folder.end_attempt()
        on_end(folder.path)


def wait_until_written(folder: RunFolder) -> None:
    """Give a full disk a minute to take what the run has to write."""
    for _ in tries():
        if folder.written():
            break


def _tokens_told(corpus: Corpus) -> str:
    if corpus.flow is not None:
        return f"text streamed from {corpus.flow.shards} virtual shards"
    return f"{len(corpus.train):,} training tokens" if corpus.tokenizer else "synthetic tokens"


def print_headline(job: Job, corpus: Corpus, world: World, folder: RunFolder, console: Console) -> None:
    """One line that says what is about to be trained, on what, and where it is kept."""
    parts: list[Any] = [
        f"{count_parameters(job.model):,} parameters",
        _tokens_told(corpus),
        f"{job.tokens_per_step:,} tokens a step ({job.batch.global_batch} × {job.batch.sequence_length}, "
        f"accumulation {job.accumulation})",
        *_packing(job, corpus),
        f"{job.precision.compute} on {device_name(world.device)}" + (f" × {world.size}" if world.size > 1 else ""),
        f"run folder {folder.path}",
    ]
    text = " · ".join(parts)
    if slow := emulated_format(job, world.device):
        text += f" · note: this CPU has no {slow} arithmetic, fp32 is far faster here"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _packing(job: Job, corpus: Corpus) -> list[str]:
    """What packing costs, where there is any, beside what concatenating would."""
    index = training_index(corpus, job.data, job.batch.sequence_length)
    if index is None:
        return []
    return [
        f"packing {job.data.packing}: {index.shares.padded:.1%} padding, {index.shares.truncated:.1%} of the tokens "
        f"cut off from their document's beginning ({index.running.truncated:.1%} if concatenated)"
    ]
