"""Experts on several ranks; that all layouts compute the same is what `verify --matrix` proves."""

import pytest
import torch

from meshwright.job import Job
from meshwright.model import routers
from meshwright.parallel import World, build
from meshwright.parallel.experts import run_starts

EXPERTS = {"count": 4, "top_k": 2, "ffn_width": 8, "capacity": 0.5}


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
    loss = model(tokens, labels=tokens, valid_count=16.0)
    dropped = [int(router.dropped) for _, router in routers(model)]
    loss.backward()
    assert [int(router.load.sum()) for _, router in routers(model)] == [32, 32]
    # Of 16 choices in a sequence four experts take two each.
    assert [int(router.dropped) for _, router in routers(model)] == dropped and min(dropped) >= 16


@pytest.mark.parametrize(
    ("sequence", "cp", "tp"), [(16, 1, 4), (9, 1, 3), (12, 3, 1), (12, 2, 3), (16, 2, 2), (8, 2, 4)]
)
def test_the_runs_of_all_ranks_are_the_sequence(sequence: int, cp: int, tp: int) -> None:
    runs = 2 if cp > 1 else 1
    length = sequence // (cp * tp)
    sizes = [-(-length // runs), length // runs] if runs == 2 else [length]
    starts = run_starts(sequence, cp, tp)
    covered = [start + i for start, size in zip(starts, sizes * (cp * tp), strict=True) for i in range(size)]
    assert sorted(covered) == list(range(sequence))
