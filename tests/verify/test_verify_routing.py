"""Routing that proves nothing is refused, and equal scores choose the same experts in every layout."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from verify_jobs import matrix_jobs

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Router
from meshwright.parallel import Weights
from meshwright.verify import check
from meshwright.verify.check import _reference, reference
from meshwright.verify.replay import Choices
from meshwright.verify.vacuous import require_routing

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def fresh_references() -> Iterator[None]:
    """A run in one process is kept for later; one of broken code must not be."""
    _reference.cache_clear()
    yield
    _reference.cache_clear()


def mixture(top_k: int = 2, batch: dict[str, Any] | None = None, **layout: Any) -> Job:
    """The matrix's mixture of four experts, for one step."""
    base = matrix_jobs()["moe · dp_shard 2, ep 2"].model_dump()
    base["layout"], base["run"]["steps"], base["model"]["experts"]["top_k"] = layout, 1, top_k
    base["batch"] |= batch or {}
    base["evaluation"]["every_steps"] = 0
    return Job.model_validate(base)


def choices(*tokens: tuple[int, ...]) -> Choices:
    """Layer 0 as it should be, and the choices of layer 1, all in one sample of the first step."""
    spread = torch.tensor([[number % 4, (number + 1) % 4] for number in range(64)])
    given = torch.tensor(tokens)
    evaluated = torch.tensor([[0, 1]] * 64)
    found = {(1, True): {0: spread}, (1, False): {0: evaluated}}
    return Choices({0: found, 1: {(1, True): {0: given}, (1, False): {0: evaluated}}})


REFUSED = {
    "all alike": ([(0, 3), (3, 0)] * 20, "layer 1 all 40 tokens choose experts 0, 3 in"),
    "nearly all alike": ([(0, 1)] * 39 + [(2, 3)], "layer 1 39 of 40 tokens choose experts 0, 1 in"),
    "one idle": ([(0, 1), (1, 2), (2, 0)] * 6, "layer 1 expert 3 gets none of 18 tokens in"),
    "some idle": ([(0, 1)] * 20 + [(1, 0)] * 1 + [(0, 2)] * 9, "layer 1 expert 3 gets none of 30 tokens in"),
}
ACCEPTED = {
    "uneven": [(0, 1)] * 36 + [(2, 3)] * 4,
    "too few for every expert": [(0, 1), (1, 2), (2, 0)] * 5,
    "very few": [(0, 1)] * 7,
}


@pytest.mark.parametrize("case", REFUSED)
def test_routing_that_shows_nothing_is_one_sentence(case: str) -> None:
    tokens, seen = REFUSED[case]
    with pytest.raises(UserError) as caught:
        require_routing(mixture(), choices(*tokens))
    sentence = str(caught.value)
    assert seen in sentence and sentence.startswith("run.seed = 0: ") and "; set another run.seed" in sentence


@pytest.mark.parametrize("case", ACCEPTED)
def test_few_tokens_and_uneven_loads_are_fine(case: str) -> None:
    require_routing(mixture(), choices(*ACCEPTED[case]))


def test_tokens_that_use_all_experts_have_no_choice() -> None:
    require_routing(mixture(top_k=4), choices(*[(0, 1)] * 40))


def always_the_first(self: Router, scores_BSN: Tensor) -> Tensor:
    return torch.arange(self.experts.top_k).expand(*scores_BSN.shape[:2], -1)


@pytest.mark.thorough
def test_verify_refuses_it_with_exit_code_2(cli, tmp_path: Path, monkeypatch: Patch) -> None:
    shape = "vocab_size = 64\nwidth = 32\nlayers = 2\nheads = 4\nmax_sequence_length = 64"
    experts = "count = 4\ntop_k = 2\nffn_width = 32\nbalance_loss = 0.01"
    (tmp_path / "job.toml").write_text(
        f"[model]\n{shape}\n[model.experts]\n{experts}\n[batch]\nsequence_length = 64\nglobal_batch = 2\n"
        "micro_batch = 1\n[layout]\ndp_shard = 2\nep = 2\n"
    )
    result = cli("verify", "job.toml", "--steps", "1")
    assert result.code == 0, result.err
    monkeypatch.setattr(Router, "_choose", always_the_first)
    _reference.cache_clear()
    result = cli("verify", "job.toml", "--steps", "1")
    assert result.code == 2 and "equal" not in result.out
    assert "in layer 0 all 32 tokens choose experts 0, 1 in the checked steps" in result.err


def test_a_difference_counts_for_more(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Router, "_choose", always_the_first)
    divide = FSDPModule.set_gradient_divide_factor
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2 * factor))
    assert not check(mixture(dp_shard=2)).equal


def tie(monkeypatch: Patch) -> None:
    """Give experts 0 and 1 the same scores exactly, and experts 2 and 3: one channel's value, or minus it."""
    module = import_module("meshwright.verify.observe")  # which its room hides behind the function
    enliven = module.enliven

    def tied(weights: Weights, modules: Sequence[nn.Module]) -> None:
        enliven(weights, modules)
        shards = weights.shards()
        for name, master in weights.masters.items():
            if name.endswith("router.linear.weight"):
                whole = torch.zeros(shards[name].shape, dtype=torch.float64)
                whole[:, 0] = torch.tensor([2.0, 2.0, -2.0, -2.0])
                master.data.copy_(shards[name].take(whole))
        weights.refresh()

    monkeypatch.setattr(module, "enliven", tied)


TIED: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2, "sp": False},
    {"cp": 2, "zero": 3},
    {"pp": 2, "batch": {"micro_batch": 2}},
]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", TIED, ids=str)
def test_equal_scores_choose_the_same_experts_in_every_layout(layout: dict[str, Any], monkeypatch: Patch) -> None:
    tie(monkeypatch)
    job = mixture(top_k=3, **layout)
    verdict = check(job)
    assert verdict.ok, verdict.first_wrong
    found = reference(job, "float64").choices
    assert found is not None
    for layer in (0, 1):  # of each pair, where one is left out it is the second
        assert found.trained(layer).sort(-1).values.unique(dim=0).tolist() == [[0, 1, 2], [0, 2, 3]]


def test_another_order_of_equal_experts_is_detected(monkeypatch: Patch) -> None:
    tie(monkeypatch)
    job = mixture(top_k=3, dp_shard=2, ep=2)
    reference(job, "float64")

    def the_last_first(self: Router, scores_BSN: Tensor) -> Tensor:
        count = scores_BSN.shape[-1]
        order = scores_BSN.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        return (count - 1 - order)[..., : self.experts.top_k]

    monkeypatch.setattr(Router, "_choose", the_last_first)
    assert {row.kind for row in check(job).rows if row.ok is False} >= {"loss", "gradient"}
