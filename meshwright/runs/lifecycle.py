"""Everything around a training: its run folder, its data, where it reports to, and how its end is recorded."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from meshwright.checkpoint import backups, require_backup, tries
from meshwright.cost import checkpoint_bytes
from meshwright.data import Corpus, lengths_of, training_index, training_stream
from meshwright.data.counted import first_conversations
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.job.hub import Tell
from meshwright.job.sanitize import without_secrets
from meshwright.model import count_parameters
from meshwright.parallel import World
from meshwright.runs.callbacks import Callbacks, CallingRecorder
from meshwright.runs.folder import RunFolder
from meshwright.runs.huggingface import keep_start, require_start, small_files
from meshwright.runs.loss_text import LOSS_TEXT, Shown, loss_text_file
from meshwright.runs.rank_zero import from_rank_zero, on_rank_zero
from meshwright.runs.rehearsed import require_training
from meshwright.runs.sinks import recorded_everywhere, require_sinks
from meshwright.train import (
    Activity,
    ConsoleProgress,
    Outcome,
    Progress,
    Recorder,
    Silent,
    Start,
    device_name,
    emulated_format,
    open_corpus,
)

OnEnd = Callable[[Path], object]
_SHOWN_CONVERSATIONS, _SHOWN_TOKENS = 3, 1000
_NAMED_SOURCES = 3
"""Sources that the headline names; of more it says how many."""


@dataclass(frozen=True)
class Finished:
    """A run that ended normally."""

    folder: Path
    outcome: Outcome
    signal: str | None = None
    """What asked it to stop, if anything."""


class Stop(Protocol):
    """Says whether the run was asked to stop, and by what."""

    signal: str | None

    def __call__(self) -> bool:
        """Called after every step."""


def run_path(loaded: LoadedJob, resume: bool = False) -> Path:
    """The path of the run: run.folder, or a new folder named after the job and the time."""
    if resume and loaded.job.run.folder is None:
        raise UserError("--resume needs run.folder, which the job does not set; set it or give the run folder as JOB")
    if loaded.job.run.folder is not None:
        require_training(path := Path(loaded.job.run.folder))
        return path
    return Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def made_for_backup(loaded: LoadedJob, path: Path, resume: bool) -> bool:
    """Whether a run whose folder is lost can continue from its backup; if so, its folder is created again."""
    target = loaded.job.checkpoint.backup_to
    if not resume or target is None or not any(one.complete for one in backups(path, target)):
        return False
    create_folder(loaded, path)
    return True


def require_room(job: Job, path: Path, resume: bool = False, tell: Tell | None = None) -> None:
    """Reject a run folder that is taken, incomplete initial weights, a disk too small for the last checkpoint, or an
    unreachable backup; initial weights with a Hugging Face name are downloaded, which `tell` reports."""
    RunFolder.require_free(path)
    require_sinks(job)
    needed = checkpoint_bytes(job, count_parameters(job.model))
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"run.folder = {path}: the disk has {free / 1e9:.2f} GB free and a checkpoint takes {needed / 1e9:.2f} GB; "
            f"free space or set run.folder to another disk"
        )
    if job.checkpoint.backup_to is not None:
        require_backup(job.checkpoint.backup_to, path, resume=resume)
    require_start(job, tell)  # last, as it may download for long


def reporter(console: Console) -> Tell | None:
    """Reports on a console; None for a quiet one, so that nothing is shown."""
    return None if console.quiet else lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def prepare_data(job: Job, console: Console) -> Corpus:
    """The job's corpus, with a progress line on the console while it is prepared."""
    with console.status("preparing data") as status:
        return open_corpus(job, lambda stage, share: status.update(f"{stage} {share:.0%}"))


def create_folder(loaded: LoadedJob, path: Path) -> RunFolder:
    """Create the run's folder with the job as a file, as the user wrote it, and as resolved."""
    file, original = (loaded.raw, None) if loaded.merged is None else (loaded.merged, loaded.raw)
    folder = RunFolder.create(path, file, loaded.job.model_dump(mode="json"), sys.argv, original)
    keep_start(loaded.job, path)
    return folder


@contextmanager
def reports(
    folder: RunFolder | None, job: Job, corpus: Corpus, start: Start, console: Console, callbacks: Callbacks
) -> Iterator[tuple[Recorder, Progress, Callable[[dict[str, Any]], None] | None, dict[str, Any] | None]]:
    """Where an attempt reports to: recorder, progress, memory curve, and the attention kernel that an earlier attempt
    chose. Only rank 0 has a folder; the others are silent."""
    if folder is None:
        yield Silent(), Silent(), None, None
        return
    for name, text in (small_files(corpus, folder.path) | _shown_data(corpus)).items():
        folder.write(name, text)
    if (index := training_index(corpus, job.data, job.batch.sequence_length)) is not None:
        folder.event("packing", packing=job.data.packing, **asdict(index.shares), concatenate=asdict(index.running))
    if (lengths := lengths_of(corpus, job.data, job.batch.sequence_length)) is not None:
        folder.event("lengths", **asdict(lengths))
    everywhere = recorded_everywhere(folder, job, start.lease.attempt)
    with ConsoleProgress(job, console) as progress, everywhere as recorder:
        folder.tell = progress.message
        yield CallingRecorder(recorder, callbacks), progress, folder.memory, _attention_of(folder)


def _shown_data(corpus: Corpus) -> dict[str, str]:
    """A file that shows what of the first conversations counts in the loss; none where every token does."""
    documents = first_conversations(corpus, _SHOWN_CONVERSATIONS, _SHOWN_TOKENS)
    shown = [Shown(one.tokens, one.loss_tokens, [(part.text, part.counts) for part in one.parts]) for one in documents]
    return {LOSS_TEXT: loss_text_file(shown)} if shown else {}


def _attention_of(folder: RunFolder) -> dict[str, Any] | None:
    """The choice that an earlier attempt of a run recorded."""
    chosen = folder.events("attention")
    return {name: chosen[-1][name] for name in ("kernel", "groups", "milliseconds")} if chosen else None


def record_end(folder: RunFolder | None, world: World, outcome: Outcome, stop: Stop, activity: Activity) -> None:
    """Record how the run ended, and wait until everything is on disk; all ranks call this together."""

    def record() -> None:
        assert folder is not None
        stop()  # if another rank was asked first, the reason may have arrived here by now
        memory = {"peak_memory_bytes": outcome.peak_memory_bytes, "steady_memory_bytes": outcome.steady_memory_bytes}
        folder.event("stop", reason=outcome.reason, step=outcome.step, signal=stop.signal, **memory)

    def end() -> None:
        assert folder is not None
        folder.require_written()
        folder.end_attempt()

    on_rank_zero(world, record)
    for _ in tries(lambda: activity.at("waiting for disk space")):
        if from_rank_zero(world, on_rank_zero(world, lambda: folder is None or folder.written())):
            break
    on_rank_zero(world, end)


def record_failure(folder: RunFolder, error: BaseException, report: str, on_end: OnEnd) -> None:
    """Close the record of a failed run, or of one that a second signal stopped at once."""
    end = {"reason": "failed", "error": report}
    if isinstance(error, KeyboardInterrupt):
        end = {"reason": "interrupted", "error": "a second signal stopped it at once, unsaved"}
    # If the disk is the failure, these writes fail too; the first error is the one the user must see.
    with contextlib.suppress(UserError, OSError):
        folder.event("stop", **end)
        wait_until_written(folder)
        folder.end_attempt()
        on_end(folder.path)


def wait_until_written(folder: RunFolder) -> None:
    """Give a full disk a minute to accept what the run has to write."""
    for _ in tries():
        if folder.written():
            break


def _data_told(job: Job, corpus: Corpus) -> str:
    """How much data there is and where it comes from."""
    sources = [without_secrets(source) for source in job.data.sources]
    names = ", ".join(sources[:_NAMED_SOURCES])
    if (more := len(sources) - _NAMED_SOURCES) > 0:
        names += f" and {more} more"
    if corpus.flow is not None:
        return f"text streamed from {names} in {corpus.flow.shards} virtual shards"
    return f"{len(corpus.train):,} training tokens of {names}" if corpus.tokenizer else f"synthetic tokens ({names})"


def print_headline(job: Job, corpus: Corpus, world: World, folder: RunFolder, console: Console) -> None:
    """One line that says what is trained, on what, and where it is saved."""
    parts: list[Any] = [
        f"{count_parameters(job.model):,} parameters",
        _data_told(job, corpus),
        f"{job.tokens_per_step:,} tokens per step ({job.batch.global_batch} × {job.batch.sequence_length}, "
        f"accumulation {job.accumulation})",
        *_packing(job, corpus),
        f"{job.precision.format} on {device_name(world.device)}" + (f" × {world.size}" if world.size > 1 else ""),
        f"run folder {folder.path}",
    ]
    text = " · ".join(parts)
    if slow := emulated_format(job, world.device):
        text += f" · note: this CPU has no {slow} arithmetic; fp32 is much faster here"
    lengths = lengths_of(corpus, job.data, job.batch.sequence_length)
    said = [] if lengths is None else [lengths.sentence(job.batch.sequence_length)]
    if job.layout.async_tp and world.device.type == "cpu":
        said.append("note: layout.async_tp = true hides nothing on a CPU: every product waits for its message")
    for line in (text, *said, *(f"note: {note}" for note in (*corpus.notes, *_little_text(job, corpus)))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _little_text(job: Job, corpus: Corpus) -> list[str]:
    """A note if one step already reads some of the text twice."""
    if corpus.flow is not None:
        most = corpus.flow.most_tokens
        if most is None or most >= job.tokens_per_step:
            return []
        return [
            f"data.sources hold at most {most:,} tokens, fewer than the {job.tokens_per_step:,} of a step, which reads "
            "some of them twice; add text or lower batch.global_batch"
        ]
    stream = training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)
    found = sum(map(len, stream.parts))
    if found >= job.batch.global_batch:
        return []
    return [
        f"data.sources hold {found} sequences of {job.batch.sequence_length} tokens, fewer than batch.global_batch = "
        f"{job.batch.global_batch}: every step reads some of them twice; add text or lower it"
    ]


def _packing(job: Job, corpus: Corpus) -> list[str]:
    """The cost of packing, if used, compared with concatenating."""
    index = training_index(corpus, job.data, job.batch.sequence_length)
    if index is None:
        return []
    samples = [f"{index.left_out:,} samples that do not fit a sequence are left out"] if index.left_out else []
    samples += [f"{index.split:,} samples that do not fit a sequence are split"] if index.split else []
    return [
        *samples,
        f"packing {job.data.packing}: {index.shares.padded:.1%} padding, {index.shares.truncated:.1%} of the tokens "
        f"separated from the beginning of their document ({index.running.truncated:.1%} if concatenated)",
    ]
