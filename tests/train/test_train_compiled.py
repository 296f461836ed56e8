"""A run says if blocks that shall be compiled run without the compiler; those with adapters, recomputing or not, and
those whose attention is shared by ranks do not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.model import CausalAttend
from meshwright.parallel import build, join_world
from meshwright.train import Outcome, Silent, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

MODEL = {
    "vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 64,
    "max_sequence_length": 16,
}  # fmt: skip


class Kept(Silent):
    """Recorder and progress that keep what is said."""

    def __init__(self) -> None:
        self.events: dict[str, Any] = {}
        self.messages: list[str] = []
        self.held_out: list[float] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.held_out += [row["val_loss"]] if "val_loss" in row else []

    def event(self, kind: str, **values: Any) -> None:
        self.events[kind] = values

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are traced and run as they are, which takes a tenth of the time."""
    compiled = torch.compile  # which a module's `compile` calls
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_job(adapter: dict[str, Any] | None, recompute: str, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": MODEL | ({} if adapter is None else {"adapter": adapter}),
            "batch": {"sequence_length": 8, "global_batch": 2, "micro_batch": 2},
            "layout": layout,
            "data": {"workers": 0},
            "memory": {"recompute": recompute},
            "evaluation": {"every_steps": 1, "batches": 1, "sample_tokens": 0},
            "run": {"steps": 1, "device": "cpu", "compile": True},
        }
    )


def train(job: Job) -> tuple[Outcome, Kept]:
    world, kept = join_world(job, torch.device("cpu")), Kept()
    engine, weights = build(job, world)
    return make_trainer(job, unequal_corpus(job), engine, weights, kept, kept, world).run(), kept


def _trained(job: Job) -> tuple[str | None, dict[str, int], dict[str, torch.Tensor]]:
    """What is said to be uncompiled, why torch stopped compiling, by count, and the weights after the steps."""
    world, kept = join_world(job, torch.device("cpu")), Kept()
    engine, weights = build(job, world)
    outcome = make_trainer(job, unequal_corpus(job), engine, weights, kept, kept, world).run()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    return outcome.uncompiled, breaks, {name: master.detach() for name, master in weights.masters.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_blocks_whose_attention_ranks_share_are_compiled_whole(method: str, recompute: str) -> None:
    job = make_job(None, recompute, cp=2, cp_method=method)
    plain = job.model_copy(update={"run": job.run.model_copy(update={"compile": False})})
    compiled, usual = run_ranks(_trained, ranks_of(job.layout), job), run_ranks(_trained, ranks_of(job.layout), plain)
    for (uncompiled, breaks, weights), (_, _, expected) in zip(compiled, usual, strict=True):
        assert uncompiled is None and breaks == {}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("base", ["compute", "nf4", "int8"])
def test_blocks_with_adapters_are_compiled(base: str, recompute: str) -> None:
    outcome, kept = train(make_job({"rank": 2, "base": base}, recompute))
    assert outcome.uncompiled is None and "uncompiled" not in kept.events
    assert len(kept.held_out) == 2 and not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.thorough
def test_a_block_that_cannot_be_compiled_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CausalAttend.__call__
    monkeypatch.setattr(CausalAttend, "__call__", torch.compiler.disable(attend, reason="a test"))
    outcome, kept = train(make_job(None, "full"))
    assert outcome.uncompiled is not None and kept.messages == [outcome.uncompiled]
    assert "run.compile" in outcome.uncompiled and "torch.compiler.disable" in kept.events["uncompiled"]["reason"]
