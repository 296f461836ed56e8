"""The two streams a run reads: training steps from a position on, and the held-out batches."""

from collections.abc import Iterator

import torch

from meshwright.data import Batch, Corpus, Loader, validation_batches
from meshwright.job import Job


def training_loader(job: Job, corpus: Corpus, device: torch.device) -> Loader:
    """Whole steps of training data in the job's order; refuses text too short for one sequence."""
    return Loader(
        corpus.train,
        seed=job.run.seed,
        sequence_length=job.batch.sequence_length,
        global_batch=job.batch.global_batch,
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        pin_memory=device.type == "cuda",
        mask_documents=job.data.mask_documents,
    )


def evaluates(job: Job) -> bool:
    """Whether the job looks at held-out text at all."""
    return job.evaluation.every_steps > 0 and job.data.validation_fraction > 0


def held_out_batches(job: Job, corpus: Corpus) -> Iterator[Batch]:
    """The same held-out micro-batches every time; refuses held-out text too short for one sequence."""
    return validation_batches(
        corpus.validation,
        job.batch.sequence_length,
        job.batch.micro_batch,
        job.evaluation.batches,
        job.data.mask_documents,
    )


def require_enough_text(job: Job, corpus: Corpus, device: torch.device) -> None:
    """Refuse a corpus that either stream could not read from, before anything is written."""
    training_loader(job, corpus, device)
    if evaluates(job):
        held_out_batches(job, corpus)
