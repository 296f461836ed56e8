"""Plans of adapters: bytes as the trainer holds them, and time without the gradients of frozen weights."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from plan_jobs import llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.job import Job, load_job
from meshwright.job.devices import Cluster
from meshwright.model import Draws
from meshwright.parallel import World, build, join_world
from meshwright.plan import Prediction, predict, search
from meshwright.plan.predict import memory_of, own_software
from meshwright.torch_private.autograd import storage_key, tree_iter
from meshwright.verify.ranks import run_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_width": 128,
    "max_sequence_length": 32,
}  # fmt: skip


def job(base: str, compute: str = "bf16", **layout: Any) -> Job:
    sections = {
        "model": SHAPE | {"adapter": {"rank": 4, "base": base}},
        "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2},
        "precision": {"compute": compute},
        "layout": layout,
        "run": {"device": "cpu"},
    }
    return Job.model_validate(sections)


def frozen_bytes(model: nn.Module) -> int:
    """Of what has no gradient, with the scales; the final norm is too small to be counted."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    kept = [p for name, p in parameters.items() if not p.requires_grad and not name.startswith("final_norm")]
    kept += [buffer for name, buffer in model.named_buffers() if ".weight_" in name]
    return sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("base", ["compute", "nf4", "int8"])
def test_what_a_rank_holds_is_what_is_predicted(base: str, compute: str) -> None:
    one = job(base, compute)
    [held] = memory_of(one, own_software(one))
    engine, weights = build(one, World(torch.device("cpu")))
    assert held.terms["frozen weights"] == frozen_bytes(engine.modules[0])
    trained = sum(master.numel() for master in weights.masters.values())
    assert trained == 3 * 4 * (2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 128))
    assert held.terms["weights"] == 4 * trained
    assert held.terms["working weights"] == (0 if compute == "fp32" else 2 * trained)
    assert held.terms["optimizer states"] == 8 * trained


def held_by_a_rank(one: Job) -> int:
    world = join_world(one, torch.device("cpu"))
    engine, weights = build(one, world)
    local = sum(tensor.nbytes for name, tensor in weights.frozen.items() if not name.startswith("final_norm"))
    return local + sum(b.nbytes for name, b in engine.modules[0].named_buffers() if ".weight_" in name)


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}, {"tp": 2}])
def test_ranks_share_what_is_frozen_as_predicted(layout: dict[str, Any]) -> None:
    one = job("nf4", **layout)
    [held] = memory_of(one, own_software(one))
    assert run_ranks(held_by_a_rank, 2, one) == [held.terms["frozen weights"]] * 2


class Peak(TorchDispatchMode):
    """The most bytes of operations' results that were alive at once."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive = {storage_key(tensor.untyped_storage()): 0 for tensor in standing}
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_iter(results) if isinstance(each, Tensor)):
            if (key := storage_key(storage)) not in self._alive:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key)
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return results


MEDIUM = SHAPE | {"vocab_size": 128, "width": 128, "head_dim": 32, "ffn_width": 384, "max_sequence_length": 128}
STATES = {"weights", "working weights", "optimizer states", "frozen weights", "workspaces"}


@pytest.mark.parametrize(
    ("adapter", "tokens", "recompute", "compute"),
    [
        ({}, (4, 64), "none", "fp32"),
        ({}, (4, 64), "full", "fp32"),
        ({"base": "nf4"}, (4, 64), "selective", "fp32"),
        ({"base": "nf4"}, (1, 32), "none", "fp32"),
        ({"base": "nf4"}, (1, 32), "none", "bf16"),
        ({"base": "int8"}, (1, 32), "full", "fp32"),
        ({"base": "int8"}, (1, 32), "none", "bf16"),
        ({"dora": True}, (1, 32), "none", "fp32"),
        ({"dora": True, "base": "nf4"}, (1, 32), "none", "fp32"),
        ({"dropout": 0.1}, (4, 64), "none", "fp32"),
    ],
)
def test_what_a_step_holds_at_its_fullest_is_what_is_predicted(
    adapter: dict[str, Any], tokens: tuple[int, int], recompute: str, compute: str
) -> None:
    """Followed operation by operation; few tokens, so that weights made from codes are seen."""
    sections = {
        "model": MEDIUM | {"adapter": {"rank": 8} | adapter},
        "data": {"mask_documents": False},
        "batch": {"sequence_length": tokens[1], "global_batch": tokens[0], "micro_batch": tokens[0]},
        "precision": {"compute": compute},
        "memory": {"recompute": recompute},
        "run": {"device": "cpu"},
    }
    one = Job.model_validate(sections)
    [held] = memory_of(one, own_software(one))
    model = build(one, World(torch.device("cpu")))[0].modules[0]
    batch = torch.randint(0, 128, tokens)
    with Peak([*model.parameters(), *model.buffers(), batch]) as peak:
        model(batch, batch, batch.numel(), draws=Draws(0, 0, torch.arange(tokens[0]))).backward()
    predicted = sum(size for name, size in held.terms.items() if name not in STATES)
    assert predicted == pytest.approx(peak.bytes, rel=0.04)


def on_one(adapter: dict[str, Any] | None) -> Prediction:
    sizes = {"sequence_length": 2048, "micro_batch": 4, "global_batch": 4}
    one = llama(model={"adapter": adapter}, batch=sizes, run={"compile": True})
    return predict(one, Cluster(nodes=1, gpus_per_node=1, gpu="h200"))


def test_frozen_weights_have_no_gradient_products() -> None:
    """LoRA computes two thirds of the products of training everything, and some small ones; making weights from codes
    moves 2.5 bytes a number, twice a step."""
    whole, lora, quantised = on_one(None), on_one({"rank": 16}), on_one({"rank": 16, "base": "nf4"})
    assert 0.6 * whole.step_s < lora.step_s < 0.8 * whole.step_s
    assert lora.step_s < quantised.step_s < 1.1 * lora.step_s
    assert quantised.fullest.terms["frozen weights"] == pytest.approx(
        0.36 * lora.fullest.terms["frozen weights"], rel=0.05
    )
    assert sum(lora.fullest.terms[name] for name in ("weights", "optimizer states")) < 0.6e9


def test_a_search_finds_layouts_for_a_base_in_4_bits() -> None:
    """70B on two cards of 80 GB: 35 GB of codes."""
    sizes = {"sequence_length": 2048, "global_batch": 16, "micro_batch": 1}
    one = llama("llama-3-70b", model={"adapter": {"base": "nf4"}}, batch=sizes, run={"compile": True})
    found = search(one, Cluster(nodes=1, gpus_per_node=2, gpu="h100"))
    best = found.best[0]
    assert best.prediction.fits and best.prediction.fullest.terms["frozen weights"] > 17e9


RECIPES = {"qlora-8b-1xrtx4090": (10, 22), "lora-8b-1xh100": (45, 70), "qlora-70b-2xh100": (25, 60)}


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_fit_their_cards(name: str) -> None:
    one = load_job(name).job
    found = predict(one, one.cluster)
    least, most = RECIPES[name]
    assert found.fits
    assert least < found.fullest.device / 2**30 < most
