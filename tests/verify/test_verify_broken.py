"""The known silent bugs, each made on purpose: verify must see it, and see it where it is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verify_jobs import llama_job, matrix_jobs

from meshwright.job import Job
from meshwright.model import routers
from meshwright.parallel import apply, inputs, materialise, tensor
from meshwright.parallel import weights as weights_module
from meshwright.parallel.engine import OneStage
from meshwright.parallel.pipelining.weights import StagedWeights
from meshwright.train import trainer
from meshwright.verify import Verdict, check
from meshwright.verify.check import reference

Patch = pytest.MonkeyPatch


def broken(job: Job, breaking: Callable[[], None]) -> Verdict:
    """The verdict on a job after breaking something; the single process's run is made before."""
    reference(job, "float64")
    breaking()
    verdict = check(job)
    assert verdict.ok is False
    return verdict


def kinds(verdict: Verdict) -> set[str]:
    return {row.kind for row in verdict.rows if row.ok is False}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"tp": 2}])
def test_unbroken_all_is_equal(layout: dict[str, Any]) -> None:
    verdict = check(llama_job(**layout))
    assert verdict.ok and verdict.first_wrong is None


def test_averaging_over_a_rank_s_own_tokens(monkeypatch: Patch) -> None:
    accumulate = OneStage.accumulate

    def local_average(self: OneStage, data: Any, step: int) -> Tensor:
        return accumulate(self, replace(data, valid_count=data.batch.valid_count() * 2), step)

    verdict = broken(llama_job(dp_replicate=2), lambda: monkeypatch.setattr(OneStage, "accumulate", local_average))
    assert kinds(verdict) == {"loss", "norm", "gradient", "update"}


@pytest.mark.thorough
def test_replicated_gradients_counted_once_for_every_copy_in_the_norm(monkeypatch: Patch) -> None:
    square_sum = weights_module.square_sum
    counted = lambda masters, shards: square_sum(masters, {n: replace(p, copies=1) for n, p in shards.items()})  # noqa: E731
    verdict = broken(llama_job(tp=2), lambda: monkeypatch.setattr(weights_module, "square_sum", counted))
    assert "norm" in kinds(verdict) and "gradient" not in kinds(verdict)
    assert verdict.first_wrong is not None and verdict.first_wrong.kind == "norm"


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2, "zero": 1}])
def test_the_norm_not_summed_over_an_axis(monkeypatch: Patch, layout: dict[str, Any]) -> None:
    square_sum = weights_module.square_sum

    def only_on_the_first(masters: Any, shards: Any) -> Tensor:
        return square_sum(masters, shards) * (2.0 if dist.get_rank() == 0 else 0.0)

    verdict = broken(llama_job(**layout), lambda: monkeypatch.setattr(weights_module, "square_sum", only_on_the_first))
    assert "norm" in kinds(verdict) and "gradient" not in kinds(verdict)


@pytest.mark.thorough
def test_gradients_of_replicated_norms_not_summed_over_tp(monkeypatch: Patch) -> None:
    def left_alone(self: Any, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        return module

    verdict = broken(llama_job(tp=2), lambda: monkeypatch.setattr(tensor.Whole, "_apply", left_alone))
    wrong = [row.name for row in verdict.rows if row.ok is False and row.kind == "gradient"]
    assert wrong and all("norm" in name for name in wrong)
    assert verdict.first_wrong is not None and verdict.first_wrong.name == "layers.0.attention_norm.weight"
    assert next(row for row in verdict.rows if row.kind == "loss").ok  # the first forward is right: a silent bug


@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}])
def test_gradients_divided_by_the_ranks_a_second_time(monkeypatch: Patch, layout: dict[str, Any]) -> None:
    divide = FSDPModule.set_gradient_divide_factor

    def twice(self: FSDPModule, factor: float) -> None:
        divide(self, 2.0 * factor)

    job = llama_job(**layout)
    verdict = broken(job, lambda: monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", twice))
    assert {"norm", "gradient", "update"} <= kinds(verdict)
    errors = [row.error for row in verdict.rows if row.kind == "gradient"]
    assert min(errors) > 0.49 and min(errors) == pytest.approx(max(errors))  # all alike: a factor, nothing else


def test_replicas_that_drift_apart_in_the_update_alone(monkeypatch: Patch) -> None:
    set_rate = trainer.set_learning_rate

    def drifting(optimizer: Any, rate: float) -> None:
        set_rate(optimizer, rate * (1.0 + 1e-6 * dist.get_rank()))

    job = llama_job(dp_replicate=2, steps=1)
    verdict = broken(job, lambda: monkeypatch.setattr(trainer, "set_learning_rate", drifting))
    assert kinds(verdict) == {"update"}


def test_a_tied_head_s_gradient_that_stays_on_the_last_stage(monkeypatch: Patch) -> None:
    def left_there(self: StagedWeights) -> None:
        for weights in self._stages.values():
            weights.collect_gradients()

    tied = llama_job(pp=2).model_dump()
    tied["model"]["tied"] = True
    verdict = broken(
        Job.model_validate(tied), lambda: monkeypatch.setattr(StagedWeights, "collect_gradients", left_there)
    )
    wrong = [row.name for row in verdict.rows if row.ok is False and row.kind == "gradient"]
    assert wrong == ["embed.weight"]


def test_a_sequence_cut_in_halves_where_attention_expects_two_pieces_a_rank(monkeypatch: Patch) -> None:
    def halves(sequence: int, rank: int, ranks: int, device: Any) -> Tensor:
        return torch.arange(sequence, device=device).chunk(ranks)[rank]

    verdict = broken(llama_job(cp=2), lambda: monkeypatch.setattr(inputs, "zigzag_places", halves))
    assert {"loss", "norm", "gradient", "update"} <= kinds(verdict)


@pytest.mark.parametrize(
    ("line", "weight"),
    [
        ("llama, adapters · dp_replicate 2", "attention.q.lora_b"),
        ("llama, adapters · dp_replicate 2", "attention.q.lora_a"),
        ("llama · dp_shard 2, zero 1, accumulation 3", "attention.k.weight"),
    ],
)
def test_initial_values_that_differ_in_a_layout(monkeypatch: Patch, line: str, weight: str) -> None:
    """An adapter's B is zero at first: verify adds to it, and must not hide what was there."""
    rows_of = materialise._with_adapters

    def shifted(*arguments: Any) -> Any:
        rows = rows_of(*arguments)
        return lambda name, *rest: rows(name, *rest) + (1e-4 if name == f"layers.1.{weight}" else 0.0)

    verdict = broken(matrix_jobs()[line], lambda: monkeypatch.setattr(materialise, "_with_adapters", shifted))
    assert {"gradient", "loss"} <= kinds(verdict)


@pytest.mark.thorough
def test_a_router_that_prefers_an_expert_by_too_little_to_change_a_choice(monkeypatch: Patch) -> None:
    reset_routers = apply.reset_routers

    def unequal(model: torch.nn.Module) -> None:
        reset_routers(model)
        for _, router in routers(model):
            router.preference[0] += 1e-12

    verdict = broken(
        matrix_jobs()["moe · dp_shard 2, ep 2"], lambda: monkeypatch.setattr(apply, "reset_routers", unequal)
    )
    names = {row.name for row in verdict.rows if row.ok is False}
    assert names and all(name.endswith(".moe.router.preference") for name in names)
