"""What a run reads: the same held-out text whatever its micro-batches, and one count of valid labels for all ranks."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.data import IGNORE
from meshwright.job import Job, load_job
from meshwright.parallel import World, join_world
from meshwright.train import held_out_batches, open_corpus, training_loader
from meshwright.train.feed import set_batches
from meshwright.verify import run_ranks

STEPS = 3


@pytest.fixture
def folder(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tiny job and its corpus are, and the same text as a JSONL file."""
    monkeypatch.chdir(tiny_job.parent)
    texts = [path.read_text()[: 40 + 9 * number] for number, path in enumerate(sorted(Path("corpus").iterdir()))]
    Path("lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return tiny_job.parent


def job_of(*overrides: str) -> Job:
    return load_job("job.toml", ["data.cache=cache", *overrides]).job


STREAMED = ("data.stream=true", 'data.sources=["lines.jsonl"]', "data.virtual_shards=4")


@pytest.mark.parametrize("kind", [(), STREAMED], ids=["prepared", "streamed"])
def test_an_evaluation_reads_the_same_text_whatever_the_micro_batch(folder: Path, kind: tuple[str, ...]) -> None:
    read = {}
    for micro_batch in (1, 2, 3, 6):
        sizes = ("batch.global_batch=6", f"batch.micro_batch={micro_batch}", "evaluation.batches=1")
        job = job_of(*kind, *sizes, 'evaluation.sets={lines = "lines.jsonl"}')
        corpus = open_corpus(job)
        for name, batches in (("held-out", held_out_batches(job, corpus)), ("set", set_batches(job, corpus, "lines"))):
            rows = [batch.tokens_BS[batch.sample_ids_B >= 0] for batch in batches]
            assert {len(row) for row in rows[:-1]} <= {micro_batch}
            read[name, micro_batch] = torch.cat(rows).tolist()
    for name in ("held-out", "set"):
        assert len(read[name, 1]) == 6, "one global batch"
        assert all(read[name, size] == read[name, 1] for size in (2, 3, 6)), name


def counts(job: Job) -> list[tuple[float, int]]:
    """Of every step, the count the loss is divided by and the valid labels this rank has."""
    world = join_world(job, torch.device("cpu"))
    loader = training_loader(job, open_corpus(job), world)
    try:
        steps = [next(loader) for _ in range(STEPS)]
    finally:
        loader.close()
    return [(step.valid_count, int((step.batch.labels_BS != IGNORE).sum())) for step in steps]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [(), STREAMED], ids=["prepared", "streamed"])
def test_every_rank_divides_by_the_whole_steps_count(folder: Path, kind: tuple[str, ...], workers: int) -> None:
    masked = (*kind, "data.mask_documents=true", f"data.workers={workers}")
    loader = training_loader(alone := job_of(*masked), open_corpus(alone), World(torch.device("cpu")))
    whole = [next(loader).valid_count for _ in range(STEPS)]
    loader.close()
    first, second = run_ranks(counts, 2, job_of(*masked, "layout.dp_shard=2"))
    for (divisor, own), (others_divisor, others), valid in zip(first, second, whole, strict=True):
        assert divisor == others_divisor == own + others == valid
    assert any(own != others for (_, own), (_, others) in zip(first, second, strict=True)), "or this proves little"


@pytest.mark.parametrize("layout", ["layout.tp=2", "layout.pp=2", "layout.cp=2"])
def test_ranks_that_read_the_same_tokens_count_them_once(folder: Path, layout: str) -> None:
    streamed = (*STREAMED, "data.mask_documents=true", "data.workers=0")
    loader = training_loader(alone := job_of(*streamed), open_corpus(alone), World(torch.device("cpu")))
    whole = [next(loader).valid_count for _ in range(STEPS)]
    for seen in run_ranks(counts, 2, job_of(*streamed, layout)):
        assert seen == [(valid, valid) for valid in whole]
