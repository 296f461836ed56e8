"""Bounds follow how numbers respond to rounding, of weights and of what is computed from them, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from verify_jobs import llama_job

from meshwright.parallel import ShardIndex
from meshwright.verify import Check, Comparison, Observation, Shard, check, formats
from meshwright.verify.formats import ALL, LARGEST
from meshwright.verify.sensitivity import exceeds, perturbation, with_sensitivity


def shard(values: list[float]) -> Shard:
    return Shard(ShardIndex(torch.arange(len(values)), None, (len(values),), 1), torch.tensor(values).double())


EXACT = Observation([2.0, 1.0], [0.5, 4.0], margins=[0.01], gradients={"weight": shard([3.0, 4.0])})


def bound_of(row: Comparison, **perturbed: Any) -> float | None:
    [changed] = with_sensitivity([row], EXACT, [replace(EXACT, **perturbed)] * 3, (), margin_size=1.0)
    return changed.bound


@pytest.mark.parametrize(
    ("row", "perturbed"),
    [
        (Comparison("norm", "step 2", 0.05, 0.01), {"norms": [9.0, 4.04]}),
        (Comparison("loss", "step 1", 0.05, 0.01), {"losses": [2.02, 9.0]}),
        (Comparison("margin", "evaluation 1", 0.05, 0.01), {"margins": [0.02]}),
        (Comparison("gradient", "weight", 0.05, 0.01), {"gradients": {"weight": shard([3.03, 4.04])}}),
        (Comparison("gradient", "weight", 0.05, 0.01), {"gradients": {"weight": shard([3.04, 4.0])}}),
        (Comparison("gradient", "weight", 0.05, 0.01, format="bf16"), {"gradients": {"weight": shard([3.05, 4.0])}}),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_number_that_responds_by_a_hundredth_may_err_by_five_times_as_much(
    row: Comparison, perturbed: dict[str, Any]
) -> None:
    assert exceeds([row]) and bound_of(row, **perturbed) == pytest.approx(0.0562, rel=0.01)
    assert bound_of(row) == 0.01  # one that does not respond keeps its bound
    small = replace(row, error=0.005)
    assert not exceeds([small]) and bound_of(small, **perturbed) == 0.01


def test_what_rounding_could_change_into_anything_has_no_bound() -> None:
    row = Comparison("norm", "step 1", 5.0, 0.01)
    assert bound_of(row, norms=[0.5 * (1 + LARGEST), 4.0]) is None


def test_all_parameters_together_may_err_as_far_as_one_run_jumps() -> None:
    """A clamp that rounding opens in one of three runs changes all gradients at once."""
    jump = replace(EXACT, gradients={"weight": shard([3.03, 4.04])})
    row = Comparison("gradient", ALL, 0.05, 0.01)
    [changed] = with_sensitivity([row], EXACT, [EXACT, jump, EXACT], ())
    assert changed.bound == pytest.approx(0.0219, rel=0.01)


@pytest.mark.parametrize(("runs", "allowed"), [([4.0001, 4.0002, 4.02], 0.0281), ([4.01, 4.02, 4.02], 0.0243)])
def test_a_number_may_err_as_far_as_one_run_jumps(runs: list[float], allowed: float) -> None:
    """A clamp that rounding opens in one of three runs; in the second case all three respond nearly alike."""
    row = Comparison("norm", "step 1", 0.05, 0.01)
    [changed] = with_sensitivity([row], replace(EXACT, norms=[4.0]), [replace(EXACT, norms=[n]) for n in runs], ())
    assert changed.bound == pytest.approx(allowed, rel=0.01)


@pytest.mark.parametrize("differs", [False, True])
def test_what_three_runs_do_not_explain_is_asked_of_more(monkeypatch: pytest.MonkeyPatch, differs: bool) -> None:
    asked = []

    def perturbed(self: Check, exact: Observation, samples: range) -> list[Observation]:
        asked.append(samples)
        return [exact for _ in samples]

    monkeypatch.setattr(Check, "_perturbed", perturbed)
    if differs:
        monkeypatch.setattr(formats, "compare_formats", lambda *_: [Comparison("norm", "step 1", 0.5, 0.01)])
    verdict = check(llama_job(steps=1, dp_shard=2), "bf16")
    assert verdict.equal is not differs
    assert asked == ([range(3), range(3, 24)] if differs else [])


def test_weights_results_and_gradients_are_perturbed() -> None:
    class Masters:
        def __init__(self, *layers: nn.Linear) -> None:
            self.masters = {str(number): layer.weight for number, layer in enumerate(layers)}
            self.frozen = {"codes": torch.ones(3, dtype=torch.uint8)}

    unit, layer = 2.0**-8, nn.Linear(64, 64, bias=False).double()
    before, weights, x = layer.weight.detach().clone(), Masters(layer), torch.ones(2, 64, dtype=torch.float64)
    perturbation(unit, 1)(weights, [layer])  # type: ignore[arg-type]
    expected = 0.39 * unit
    assert float((layer.weight.detach() / before - 1).std()) == pytest.approx(expected, rel=0.1)
    out = layer(x.requires_grad_())
    assert float((out.detach() / (x @ layer.weight.T).detach() - 1).std()) == pytest.approx(expected, rel=0.2)
    out.backward(torch.ones_like(out))
    assert layer.weight.grad is not None  # of every row: the same, but for what its result's gradients were changed by
    assert float((layer.weight.grad[:, 0] / 2 - 1).std()) == pytest.approx(expected / 2**0.5, rel=0.3)
