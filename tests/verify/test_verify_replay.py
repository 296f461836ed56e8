"""Routing replayed in low precision: every token gets the experts it had in one process, in any layout."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from verify_jobs import matrix_jobs

from meshwright.api import verify
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Router
from meshwright.parallel import World, build
from meshwright.verify import Verdict, check
from meshwright.verify.check import _reference, reference
from meshwright.verify.formats import in_format
from meshwright.verify.observe import observe
from meshwright.verify.replay import Choices, Replayed, Replaying

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_references() -> Iterator[None]:
    """A run in one process is kept for later; one of broken code must not be."""
    _reference.cache_clear()
    yield
    _reference.cache_clear()


def mixture(steps: int = 1, batch: dict[str, Any] | None = None, recompute: Any = "none", **layout: Any) -> Job:
    """The matrix's mixture with two layers, four experts and two of them for a token."""
    base = matrix_jobs()["moe · dp_shard 2, ep 2"].model_dump()
    base["layout"], base["run"]["steps"], base["memory"]["recompute"] = layout, steps, recompute
    base["batch"] |= batch or {}
    base["evaluation"]["every_steps"] = 0
    return Job.model_validate(base)


def choices_of(job: Job) -> int:
    """Over all steps: tokens × layers with experts × experts of a token."""
    assert job.model.experts is not None
    tokens = job.run.steps * job.batch.global_batch * job.batch.sequence_length
    return tokens * job.model.layers * job.model.experts.top_k


LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2, "recompute": "full"},
    {"tp": 2, "ep": 2, "sp": False},
    {"cp": 2, "tp": 2, "batch": {"micro_batch": 2}},
    {"pp": 2, "recompute": "selective"},
]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_choice_is_replayed_once_in_any_layout(layout: dict[str, Any]) -> None:
    job = mixture(**layout)
    verdict = check(job, "bf16")
    assert verdict.ok, verdict.first_wrong
    assert verdict.replayed is not None and verdict.replayed.choices == choices_of(job)
    assert verdict.replayed.differing < 0.05 * choices_of(job)
    assert verdict.notes[-1] == f"bf16: {verdict.replayed}"


def other_choices(seen: Choices, experts: int) -> Choices:
    """Every expert's neighbour in place of it, in every second place: choices that no router makes."""
    changed = Choices()
    for layer, moments in seen.by_layer.items():
        changed.by_layer[layer] = {
            moment: {sample: _neighbours(chosen, experts) for sample, chosen in samples.items()}
            for moment, samples in moments.items()
        }
    return changed


def _neighbours(chosen_SK: Tensor, experts: int) -> Tensor:
    changed = chosen_SK.clone()
    changed[::2] = (changed[::2] + 1) % experts
    return changed


@pytest.mark.parametrize(
    ("recompute", "micro_batch"), [("none", 1), ("full", 2), ("selective", 4), ({"segments": 2}, 2)], ids=str
)
def test_it_is_replayed_in_recomputed_forwards_and_every_micro_batch(recompute: Any, micro_batch: int) -> None:
    """Choices far from the routers' own: a forward that did not use them would give other gradients."""
    plain = mixture(batch={"micro_batch": 4})
    found = observe(plain, torch.float64).choices
    assert found is not None
    choices = other_choices(found, 4)
    expected = observe(plain, torch.float64, choices=choices)
    own = observe(mixture(batch={"micro_batch": micro_batch}, recompute=recompute), torch.float64, choices=choices)
    assert expected.replayed is not None and expected.replayed.differing > 0.1 * expected.replayed.choices
    assert own.replayed == expected.replayed
    for name, shard in expected.gradients.items():
        torch.testing.assert_close(own.gradients[name].values, shard.values, rtol=1e-9, atol=1e-12)


def wrong(verdict: Verdict) -> set[str]:
    return {row.kind for row in verdict.rows if row.ok is False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_another_token_s_choice_is_detected(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = mixture(dp_shard=2, ep=2)
    small = in_format(job, dtype)[0] if dtype == "bf16" else job
    reference(small, dtype)  # before anything is broken
    replay = Replaying.__call__

    def the_token_before(self: Replaying, *given: Any) -> dict[int, Tensor]:
        tokens = int(dist.get_world_size() > 1)  # one process also measures responses to rounding
        return {layer: chosen_BSK.roll(tokens, dims=1) for layer, chosen_BSK in replay(self, *given).items()}

    monkeypatch.setattr(Replaying, "__call__", the_token_before)
    assert {"loss", "gradient"} <= wrong(check(job, dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_a_router_that_chooses_wrongly_is_detected_although_its_choice_is_not_used(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = mixture(dp_shard=2, ep=2)
    reference(in_format(job, dtype)[0] if dtype == "bf16" else job, dtype)
    choose = Router._choose
    monkeypatch.setattr(Router, "_choose", lambda self, scores_BSN: choose(self, -scores_BSN))
    assert wrong(check(job, dtype)) == {"routing"}


def test_float64_computes_its_routing() -> None:
    verdict = check(mixture(dp_shard=2, ep=2))
    assert verdict.ok and verdict.replayed is None and not verdict.notes


@pytest.mark.thorough
def test_a_job_is_told_that_its_routing_was_replayed() -> None:
    job = mixture(dp_shard=2, ep=2)
    narrow = job.model_copy(update={"precision": job.precision.model_copy(update={"compute": "bf16"})})
    notes = verify(narrow, steps=1).notes
    assert sum("bf16: routing replayed: " in note for note in notes) == 1
    notes = verify(narrow, steps=1, dtype="float32").notes
    assert any(note.startswith("float32: routing replayed: 0 of ") for note in notes)


def test_weights_and_gradients_are_those_of_its_own_scores() -> None:
    engine, _ = build(mixture(), World(CPU), torch.float64)
    [model] = engine.modules
    router: Any = model.get_submodule("layers.0.moe.router")
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    given = torch.tensor([[[3, 1], [0, 2], [2, 1], [1, 0]]])
    routing = router(x, given)
    scores = (x @ router.linear.weight.T).softmax(-1).gather(-1, given)
    torch.testing.assert_close(routing.weights_BSK, scores / scores.sum(-1, keepdim=True))
    assert routing.counts_BN.tolist() == [given.flatten().bincount(minlength=4).tolist()]
    assert routing.weights_BSK.requires_grad
    assert torch.equal(routing.own_BSK, router(x).chosen_BSK)


def test_the_numbers_of_all_ranks_are_added_up() -> None:
    assert Replayed.of([None, None]) is None
    assert str(Replayed.of([Replayed(1, 600), Replayed(2, 900)])) == (
        "routing replayed: 3 of 1,500 choices would have differed"
    )


def test_a_run_of_a_mixture_is_checked_in_float64_only() -> None:
    with pytest.raises(UserError, match=r"--dtype float32: .*; use float64 with --run"):
        verify(mixture(dp_shard=2, ep=2), run=True, dtype="float32")
