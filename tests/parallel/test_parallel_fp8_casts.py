"""Weights in fp8 kept over the micro-batches of a step: the same bits as casting each time, with fewer casts."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.job import Job
from meshwright.layout import casts_from
from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.parallel import World, build, engine, fp8_casts
from meshwright.parallel.fp8 import Fp8Linear, cast_weight
from meshwright.parallel.fp8_scales import Cast
from meshwright.verify import observe, run_ranks

LINEARS = 2 * 7
STEPS, MICRO_BATCHES = 2, 3
"""Weights differ in the second step; where ranks share the states, copies serve from the second micro-batch on."""


def make_job(scales: str = "tensor", micro_batches: int = MICRO_BATCHES, memory: Any = None, **layout: Any) -> Job:
    ranks = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    return Job.model_validate(
        {
            "model": {
                "vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 64,
                "max_sequence_length": 16,
            },
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": micro_batches * ranks, "micro_batch": 1},
            "precision": {"compute": "fp8", "fp8_scales": scales},
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "memory": memory or {},
            "layout": layout,
            "run": {"steps": STEPS},
        }
    )  # fmt: skip


def seen(job: Job, once: bool) -> tuple[Any, int]:
    """What a rank observes over some steps, and how many weights were cast ahead."""
    count, made, asked = 0, cast_weight, casts_from

    def counting(weight_NK: torch.Tensor, scales: str) -> Cast:
        nonlocal count
        count += 1
        return made(weight_NK, scales)

    fp8_casts.cast_weight, engine.casts_from = counting, asked if once else lambda job: None
    try:
        observed = observe(job, None)
    finally:
        fp8_casts.cast_weight, engine.casts_from = made, asked
    return (observed.losses, observed.norms, observed.updates), count


def both_ways(jobs: list[Job]) -> list[tuple[bool, int, int]]:
    """For each job whether the bits agree, and casts ahead with and without keeping them."""
    results = []
    for job in jobs:
        (kept, casts), (anew, none) = seen(job, True), seen(job, False)
        updates = all(torch.equal(shard.values, anew[2][name].values) for name, shard in kept[2].items())
        results.append((kept[:2] == anew[:2] and updates and len(kept[0]) == STEPS, casts, none))
    return results


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *({"scales": scales} for scales in ("tensor", "row", "block")),
        {"memory": {"recompute": "full"}},
        {"memory": {"recompute": "selective"}},
    ],
    2: [{"dp_shard": 2, "zero": 2}, {"dp_replicate": 2}, {"tp": 2}],
}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", CASES)
def test_kept_copies_give_the_same_bits_with_one_cast_a_step(ranks: int) -> None:
    jobs = [make_job(**changes) for changes in CASES[ranks]]
    for results in run_ranks(both_ways, ranks, jobs):
        for changes, (same, casts, none) in zip(CASES[ranks], results, strict=True):
            assert same and none == 0, changes
            assert casts == STEPS * LINEARS, changes  # not once for each micro-batch


def test_where_nothing_would_be_saved_nothing_is_kept() -> None:
    assert casts_from(make_job()) == 1 and casts_from(make_job(dp_shard=2, zero=1)) == 2
    assert casts_from(make_job(micro_batches=1)) is None and casts_from(make_job(micro_batches=2)) == 1
    assert casts_from(make_job(micro_batches=2, dp_shard=2)) is None  # the first micro-batch casts while it gathers
    assert casts_from(make_job(dp_shard=2, zero=3)) is None
    assert casts_from(make_job(pp=2)) is None
    assert casts_from(make_job(memory={"offload": ["params"]})) is None
    job = make_job()
    assert (
        casts_from(job.model_copy(update={"precision": job.precision.model_copy(update={"compute": "bf16"})})) is None
    )


@pytest.mark.thorough
def test_compiled_blocks_read_the_kept_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled, q, k and v are one product, and so are gate and up: one copy for all of them."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    tokens, grads = torch.arange(16).unsqueeze(0), []
    job = make_job("block")
    one_block, compiled = job.model.model_copy(update={"layers": 1}), job.run.model_copy(update={"compile": True})
    job = job.model_copy(update={"model": one_block, "run": compiled})
    built, weights = build(job, World(torch.device("cpu")))
    [model] = built.modules
    assert all(module.fused for module in model.modules() if isinstance(module, Attention | FeedForward))
    casts = fp8_casts.WeightCasts(model, 1)
    for kept in (False, True):
        if kept:
            casts.start(1)
        model(tokens, tokens, 16).backward()
        casts.stop()
        grads.append({name: master.grad for name, master in weights.masters.items()})
        weights.zero_gradients()
    held = [module for module in model.modules() if isinstance(module, Fp8Linear) and module in casts._made]
    assert len(held) == 4 and all(linear.cast is None for linear in held)
    for name, anew in grads[0].items():
        assert anew is not None and anew.any() and torch.equal(anew, grads[1][name]), name
    # What was kept is what is read: with other copies the result is another.
    casts.start(1)
    for linear in held:
        assert linear.cast is not None
        linear.cast.scales.mul_(2)
    assert not torch.equal(grads[0][name], _gradient(model, tokens, weights, name))


def _gradient(model: nn.Module, tokens: torch.Tensor, weights: Any, name: str) -> torch.Tensor:
    model(tokens, tokens, 16).backward()
    gradient: torch.Tensor = weights.masters[name].grad
    return gradient
