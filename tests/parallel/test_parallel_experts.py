"""Experts on several ranks; that all layouts compute the same is what `verify --matrix` proves."""

from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.model import routers
from meshwright.parallel import World, build, experts, join_world
from meshwright.parallel.experts import run_starts
from meshwright.verify.ranks import run_ranks

EXPERTS = {"count": 4, "top_k": 2, "ffn_width": 8}
MODEL = {"vocab_size": 32, "width": 8, "layers": 2, "heads": 2, "experts": EXPERTS}


@pytest.mark.parametrize("recompute", ["none", "full", "selective", {"segments": 2}])
def test_recomputed_tokens_are_counted_once(recompute: object) -> None:
    job = Job.model_validate(
        {
            "model": MODEL | {"experts": EXPERTS | {"capacity": 0.5}},
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


def events_of_a_pass() -> list[str]:
    """What a rank does in one layer's forward and backward, in order."""
    job = Job.model_validate(
        {
            "model": MODEL | {"layers": 1, "experts": EXPERTS | {"shared_width": 8}},
            "batch": {"sequence_length": 8, "global_batch": 4, "micro_batch": 2},
            "layout": {"dp_shard": 2, "ep": 2},
        }
    )
    engine, weights = build(job, join_world(job, torch.device("cpu")))
    [model], seen = engine.modules, []

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return call(*args, **options)

        return run

    transfer: Any = experts._Transfer
    transfer.start, transfer.wait = noted("start", transfer.start), noted("wait", transfer.wait)
    shared = model.get_submodule("layers.0.shared")
    shared.register_forward_hook(lambda *_: seen.append("shared"))
    shared.register_full_backward_hook(lambda *_: seen.append("shared"))
    weights.start_micro_batch(last=True)
    tokens = torch.randint(0, 32, (2, 8))
    model(tokens, tokens, 32.0).backward()
    return seen


def test_the_shared_expert_computes_while_rows_travel() -> None:
    """In both directions: rows to the experts, and their gradients back from there."""
    for seen in run_ranks(events_of_a_pass, 2):
        assert [seen.count(each) for each in ("start", "wait", "shared")] == [4, 4, 2]
        forward, backward = seen[: len(seen) // 2], seen[len(seen) // 2 :]
        assert forward == ["start", "shared", "wait", "start", "wait"]
        assert backward == ["start", "wait", "start", "shared", "wait"]
