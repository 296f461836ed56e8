"""`meshwright.data.loader`: the very batches that a job trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.api.jobs import JobLike, load_job

if TYPE_CHECKING:
    from meshwright.data import Loader, StreamLoader


def loader(job: JobLike, *, position: int = 0, rank: int = 0, ranks: int = 1) -> Loader | StreamLoader:
    """An endless iterator over a job's steps from a sample of the global stream on, read in this process.

    A step has its `batch` (tokens_BS, labels_BS …) and its `valid_count`. Text is prepared first where it is not yet.
    `rank` of `ranks` are those that read different sequences: each is given its share of every step.
    """
    import torch

    from meshwright.parallel import World
    from meshwright.train import open_corpus, training_loader

    own = load_job(job, {"data.workers": 0})
    axes = dict.fromkeys(("pp", "dp_shard", "cp", "tp"), (0, 1)) | {"dp_replicate": (rank, ranks)}
    return training_loader(own, open_corpus(own), World(torch.device("cpu"), axes=axes), position)
