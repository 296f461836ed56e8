"""The two streams a run reads: training steps from a given position, and the held-out batches."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from meshwright.data import (
    SHAPES,
    TONES,
    Batch,
    Corpus,
    Cursor,
    Loader,
    MemoryTokens,
    Slots,
    Stream,
    StreamLoader,
    evaluation_windows,
    gpu_decoder,
    open_flow,
    prepare,
    shapes_corpus,
    tones_corpus,
    training_stream,
    validation_batches,
    validation_windows,
)
from meshwright.data.raw import SYNTHETIC
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.parallel import World

LOOKS, LOOK_TOKENS = 64, 64


def open_corpus(job: Job, report: Callable[[str, float], None] | None = None) -> Corpus:
    """The text to train and evaluate on: prepared now or before, or streamed during training."""
    sizes = (job.model.vocab_size, job.batch.sequence_length, len(job.data.sources) - 1)
    if SHAPES in job.data.sources:
        return shapes_corpus(job.model.vision, *sizes)
    if TONES in job.data.sources:
        return tones_corpus(job.model.audio, *sizes)
    if not job.data.stream:
        corpus = prepare(job.data, job.model.vocab_size, report)
        if job.model.encoder is None or SYNTHETIC not in job.data.sources:
            return corpus
        return replace(corpus, noise=Slots.of(job.model.encoder))
    flow = open_flow(job.data, job.model.vocab_size)
    wanted = evaluated_sequences(job) * job.batch.sequence_length + 1
    held_out = flow.held_out(wanted) if evaluates(job) else MemoryTokens([], [])
    return Corpus(flow.tokenizer, MemoryTokens([], []), held_out, None, notes=flow.notes, flow=flow)


def training_loader(
    job: Job, corpus: Corpus, world: World, position: int = 0, cursors: Mapping[int, Cursor] | None = None
) -> Loader | StreamLoader:
    """This rank's part of every step in the job's order, starting at a sample of the global stream; rejects text too
    short for one sequence."""
    if corpus.flow is not None:
        return _stream_loader(job, corpus, world, position, cursors)
    return Loader(
        _stream(job, corpus),
        global_batch=job.batch.global_batch,
        position=position,
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        pin_memory=job.data.pin_memory and world.device.type == "cuda",
        rank=world.data_rank,
        ranks=world.data_ranks,
        decoder=gpu_decoder(job.data, world.device, _say if world.data_rank == 0 else lambda sentence: None),
    )


def _stream(job: Job, corpus: Corpus) -> Stream:
    return training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed)


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def _stream_loader(
    job: Job, corpus: Corpus, world: World, position: int, cursors: Mapping[int, Cursor] | None
) -> StreamLoader:
    assert corpus.flow is not None
    if job.data.mask_documents and job.layout.schedule == "pipedream":
        raise UserError(
            "data.stream with data.mask_documents needs a sum over ranks in each step, which layout.schedule = "
            '"pipedream" does not make; prepare the data'
        )

    def total(valid: int) -> float:
        return world.sum_over_world([float(valid) if world.leads_data else 0.0])[0]

    return StreamLoader(
        corpus.flow,
        seed=job.run.seed,
        sequence_length=job.batch.sequence_length,
        global_batch=job.batch.global_batch,
        position=position,
        cursors=cursors,
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        pin_memory=job.data.pin_memory and world.device.type == "cuda",
        rank=world.data_rank,
        ranks=world.data_ranks,
        total=total,
    )


def evaluates(job: Job) -> bool:
    """Whether the job evaluates at all."""
    return job.evaluation.every_steps > 0 and job.data.validation_fraction > 0


def evaluated_sequences(job: Job) -> int:
    """Sequences of a text per evaluation; independent of micro-batches and ranks."""
    return job.evaluation.batches * job.batch.global_batch


def evaluation_due(job: Job, step: int) -> bool:
    """Whether held-out text or another set is evaluated after a step."""
    some = evaluates(job) or (job.evaluation.every_steps > 0 and bool(job.evaluation.sets))
    return some and (step % job.evaluation.every_steps == 0 or step == job.run.steps)


def held_out_batches(job: Job, corpus: Corpus) -> Iterator[Batch]:
    """The same held-out micro-batches every time; rejects held-out text too short for one sequence."""
    windows = validation_windows(corpus, job.data, job.batch.sequence_length)
    return validation_batches(windows, job.batch.micro_batch, evaluated_sequences(job))


def set_batches(job: Job, corpus: Corpus, name: str) -> Iterator[Batch]:
    """The same micro-batches of an evaluation set every time; rejects a set the model cannot read."""
    if corpus.tokenizer is None:
        raise UserError(f"evaluation.sets.{name} needs text to train on, and data.sources are synthetic; leave it out")
    windows = evaluation_windows(
        f"evaluation.sets.{name}",
        job.evaluation.sets[name],
        corpus.tokenizer,
        job.data,
        job.model.vocab_size,
        job.batch.sequence_length,
    )
    return validation_batches(windows, job.batch.micro_batch, evaluated_sequences(job))


def require_enough_text(job: Job, corpus: Corpus, world: World) -> None:
    """Reject a corpus too short for either stream, before anything is written."""
    if corpus.flow is not None:
        _stream_loader(job, corpus, world, 0, None)
    else:  # without a decoder, which would say twice why it is not used
        _stream(job, corpus)
    if evaluates(job):
        held_out_batches(job, corpus)
    if job.evaluation.every_steps:
        for name in job.evaluation.sets:
            set_batches(job, corpus, name)


def fingerprint(corpus: Corpus) -> str:
    """A fingerprint of a corpus's training tokens: their number and samples from all over."""
    if corpus.flow is not None:
        return corpus.flow.fingerprint()
    if corpus.windows is not None:
        return hashlib.sha256(repr(corpus.windows[0]).encode()).hexdigest()[:16]
    store = corpus.train
    digest = hashlib.sha256(str(len(store)).encode())
    for look in range(LOOKS):
        start = look * len(store) // LOOKS
        digest.update(store.read(start, min(len(store), start + LOOK_TOKENS)).tobytes())
    return digest.hexdigest()[:16]
