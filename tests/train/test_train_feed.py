"""What a run reads as it streams: every rank knows the labels of the whole step, whichever ranks share its tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data import StreamLoader
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.parallel import World, join_world
from meshwright.train.feed import open_corpus, training_loader
from meshwright.verify.ranks import run_ranks

STEPS = 3


def make_job(folder: Path, **layout: int) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 300, "width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_width": 16},
            "data": {"sources": (str(folder / "texts.jsonl"),), "cache": str(folder / "cache")}
            | {"stream": True, "mask_documents": True, "shuffle_buffer": 3, "virtual_shards": 4, "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 1},
            "evaluation": {"every_steps": 0},
            "run": {"steps": STEPS, "device": "cpu"},
            "layout": layout,
        }
    )


def read(job: Job) -> list[tuple[Tensor, float]]:
    """This rank's labels of every step, and what it is told of everyone's."""
    world = World(torch.device("cpu")) if ranks_of(job.layout) == 1 else join_world(job, torch.device("cpu"))
    loader = training_loader(job, open_corpus(job), world)
    assert isinstance(loader, StreamLoader)
    steps = [next(loader) for _ in range(STEPS)]
    return [(step.batch.labels_BS, step.valid_count) for step in steps]


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2, "cp": 2}, {"pp": 2}], ids=str)
def test_a_streamed_step_is_divided_by_the_labels_of_all_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    texts = [" ".join(f"word{number}" for number in range(length)) for length in range(3, 90)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    whole = read(make_job(tmp_path))  # which also leaves a tokenizer in the cache
    job = make_job(tmp_path, **layout)
    for labels_and_counts in run_ranks(read, ranks_of(job.layout), job):
        counts = [count for _, count in labels_and_counts]
        assert counts == [count for _, count in whole] == [int((labels != -100).sum()) for labels, _ in whole]
