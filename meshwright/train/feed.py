"""The two streams a run reads: training steps from a position on, and the held-out batches."""

import hashlib
from collections.abc import Iterator

from meshwright.data import Batch, Corpus, Loader, training_stream, validation_batches, validation_windows
from meshwright.job import Job
from meshwright.parallel import World

LOOKS, LOOK_TOKENS = 64, 64


def training_loader(job: Job, corpus: Corpus, world: World, position: int = 0) -> Loader:
    """This rank's part of every step in the job's order, from a sample of the global stream on; refuses text too short
    for one sequence."""
    return Loader(
        training_stream(corpus, job.data, job.batch.sequence_length, job.run.seed),
        global_batch=job.batch.global_batch,
        position=position,
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        pin_memory=job.data.pin_memory and world.device.type == "cuda",
        rank=world.data_rank,
        ranks=world.data_ranks,
    )


def evaluates(job: Job) -> bool:
    """Whether the job looks at held-out text at all."""
    return job.evaluation.every_steps > 0 and job.data.validation_fraction > 0


def evaluation_due(job: Job, step: int) -> bool:
    """Whether held-out text is looked at after a step."""
    return evaluates(job) and (step % job.evaluation.every_steps == 0 or step == job.run.steps)


def held_out_batches(job: Job, corpus: Corpus) -> Iterator[Batch]:
    """The same held-out micro-batches every time; refuses held-out text too short for one sequence."""
    windows = validation_windows(corpus, job.data, job.batch.sequence_length)
    return validation_batches(windows, job.batch.micro_batch, job.evaluation.batches)


def require_enough_text(job: Job, corpus: Corpus, world: World) -> None:
    """Refuse a corpus that either stream could not read from, before anything is written."""
    training_loader(job, corpus, world)
    if evaluates(job):
        held_out_batches(job, corpus)


def fingerprint(corpus: Corpus) -> str:
    """Tells whether two corpora have the same training tokens, by their number and looks at places all over them."""
    store = corpus.train
    digest = hashlib.sha256(str(len(store)).encode())
    for look in range(LOOKS):
        start = look * len(store) // LOOKS
        digest.update(store.read(start, min(len(store), start + LOOK_TOKENS)).tobytes())
    return digest.hexdigest()[:16]
