"""Working weights that lie side by side: the same bits as apart, and nothing of them is kept for the backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.parallel import World, apply, build
from meshwright.train import Silent, make_trainer, open_corpus

SHAPES: dict[str, dict[str, Any]] = {
    "grouped, gated": {"heads": 4, "kv_heads": 2},
    "biases, no gate": {"heads": 4, "kv_heads": 4, "qkv_bias": True, "linear_bias": True, "activation": "gelu"},
    "norms of queries and keys": {"heads": 4, "kv_heads": 2, "qk_norm": True},
}


def make_job(shape: dict[str, Any], recompute: Any = "none") -> Job:
    small = {"vocab_size": 64, "width": 32, "layers": 2, "ffn_width": 48, "max_sequence_length": 16}
    return Job.model_validate(
        {
            "model": small | shape,
            "data": {"sources": ["builtin:synthetic"]},
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2},
            "precision": {"compute": "bf16"},
            "memory": {"recompute": recompute},
            "optimizer": {"lr": 1e-2},
            "evaluation": {"every_steps": 1, "batches": 1, "sample_tokens": 0},
            "run": {"steps": 2, "compile": True, "device": "cpu"},
        }
    )


class Losses(Silent):
    """Keeps every step's loss and norm, and the losses of held-out text."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self.held_out: list[float] = []

    def metric(self, row: dict[str, Any]) -> None:
        if "val_loss" in row:
            self.held_out.append(row["val_loss"])
        else:
            self.rows.append((row["loss"], row["grad_norm"]))


def trained(job: Job, device: str = "cpu") -> tuple[Losses, dict[str, Tensor], nn.Module]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    world, seen, corpus = World(torch.device(device)), Losses(), open_corpus(job)
    engine, weights = build(job, world)
    make_trainer(job, corpus, engine, weights, seen, seen, world).run()
    masters = {name: master.detach().clone() for name, master in weights.masters.items()}
    return seen, masters, engine.modules[0]


@pytest.fixture(autouse=True)
def _no_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("grouped, gated", "none"),
        ("grouped, gated", "full"),
        ("biases, no gate", "none"),
        ("norms of queries and keys", "selective"),
    ],
)
def test_the_same_bits_as_apart(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name]
    job = make_job(shape, recompute)
    seen, masters, model = trained(job)
    assert not torch._dynamo.utils.counters["graph_break"]  # nor in evaluations, which need no gradients
    joined = [module for module in model.modules() if getattr(module, "joined", None) is not None]
    assert len(joined) == (2 if shape.get("activation") == "gelu" else 4)
    for module in joined:
        assert isinstance(module, Attention | FeedForward) and module.joined is not None
        weights = [linear.weight.detach() for linear in module.fused_linears()]
        assert torch.equal(module.joined, torch.cat(weights))  # updates arrive in both
        assert {weight.untyped_storage().data_ptr() for weight in weights} == {module.joined.data_ptr()}
    monkeypatch.setattr(apply, "join_working_weights", lambda *_: None)
    apart, masters_apart, model_apart = trained(job)
    assert not [module for module in model_apart.modules() if getattr(module, "joined", None) is not None]
    assert seen.rows == apart.rows and len({loss for loss, _ in seen.rows}) == 2
    assert seen.held_out == apart.held_out and len(seen.held_out) == 3
    assert all(torch.equal(master, masters_apart[name]) for name, master in masters.items())


@pytest.mark.gpu
def test_on_a_gpu_training_and_evaluations_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with generated code
    job = make_job(SHAPES["grouped, gated"] | {"head_dim": 16})
    seen = trained(job.model_copy(update={"run": job.run.model_copy(update={"device": "cuda"})}), "cuda")[0]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(set(seen.held_out)) == 3
