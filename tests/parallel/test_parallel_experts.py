"""Experts on several ranks; that all layouts compute the same is what `verify --matrix` proves."""

import pytest
import torch

from meshwright.job import Job
from meshwright.model import routers
from meshwright.parallel import World, build

EXPERTS = {"count": 4, "top_k": 2, "ffn_width": 8}


@pytest.mark.parametrize("recompute", ["none", "full", "selective", {"segments": 2}])
def test_recomputed_tokens_are_counted_once(recompute: object) -> None:
    job = Job.model_validate(
        {
            "model": {"vocab_size": 32, "width": 8, "layers": 2, "heads": 2, "experts": EXPERTS},
            "memory": {"recompute": recompute},
            "run": {"device": "cpu"},
        }
    )
    engine, _ = build(job, World(torch.device("cpu")))
    [model] = engine.modules
    tokens = torch.randint(0, 32, (2, 8))
    model(tokens, labels=tokens, valid_count=16.0).backward()
    assert [int(router.load.sum()) for _, router in routers(model)] == [32, 32]
