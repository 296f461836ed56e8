"""16- and 8-bit formats are judged: what is right uses a fair part of the bounds, and every mistake exceeds them."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from verify_jobs import llama_job

from meshwright.job import Job
from meshwright.layout import require_layout
from meshwright.model.block import Block
from meshwright.model.feedforward import FeedForward
from meshwright.parallel import Weights, apply, fp8, fp8_head, fp8_scales, zero
from meshwright.train import trainer
from meshwright.verify import Check, Observation, Verdict, check, check_job, shrink
from meshwright.verify.check import _in_format, _reference, _reference_job, reference
from meshwright.verify.formats import ALL, BLOCK_ROUNDINGS, END_ROUNDINGS, UNITS, in_format, own_format
from meshwright.verify.sensitivity import unit_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def fresh_references() -> Iterator[None]:
    """A run in one process is kept for later; one of broken code must not be."""
    _reference.cache_clear()
    yield
    _reference.cache_clear()


PERTURBED: dict[tuple[str, float, range], list[Observation]] = {}
perturb = Check._perturbed


@pytest.fixture(autouse=True)
def responses_to_rounding_are_measured_once(monkeypatch: Patch) -> None:
    """They are measured in float64, which none of the mistakes made here touches: one measurement serves all layouts
    of a job."""

    def measured_once(self: Check, exact: Observation, samples: range) -> list[Observation]:
        job, _ = _in_format(_reference_job(self.job), "float64")
        key = (job.model_dump_json(exclude={"precision"}), unit_of(self.job, self.dtype), samples)
        if key not in PERTURBED:
            PERTURBED[key] = perturb(self, exact, samples)
        return PERTURBED[key]

    monkeypatch.setattr(Check, "_perturbed", measured_once)


def job_of(layers: int = 2, gradients: str = "fp32", batch: dict[str, Any] | None = None, **layout: Any) -> Job:
    job = llama_job(batch=batch, **layout).model_dump()
    job["model"]["layers"], job["precision"]["gradients"] = layers, gradients
    job["precision"]["compute"] = "bf16"
    return Job.model_validate(job)


def wrong(verdict: Verdict) -> set[str]:
    return {row.kind for row in verdict.rows if row.ok is False}


def largest_shares(verdict: Verdict) -> dict[str, float]:
    """How much of its bound the worst row of each kind uses."""
    shares: dict[str, float] = {}
    for row in verdict.rows:
        assert row.bound is not None
        shares[row.kind] = max(shares.get(row.kind, 0.0), row.error / row.bound)
    return shares


RIGHT = [
    ("bf16", {"tp": 2}, 2),
    ("bf16", {"dp_shard": 2, "zero": 3}, 6),
    ("fp16", {"pp": 2}, 4),
    ("fp8", {"dp_replicate": 2}, 2),
    ("fp8", {"tp": 2}, 1),
]


@cache
def verdict_on(name: str, layers: int, **layout: Any) -> Verdict:
    """Of unbroken code, once for all tests that ask."""
    return check(job_of(layers, **layout), name)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout", "layers"), RIGHT, ids=str)
def test_right_layouts_use_a_fair_part_of_their_bounds(name: str, layout: dict[str, Any], layers: int) -> None:
    verdict = verdict_on(name, layers, **layout)
    assert verdict.ok, verdict.first_wrong
    shares = largest_shares(verdict)
    assert set(shares) == {"loss", "norm", "gradient", "update", "sum"}
    assert min(shares["gradient"], shares["update"], shares["sum"]) > 0.2, shares
    assert shares["loss"] > 0.01 and shares["norm"] > 0.01, shares
    assert {row.format for row in verdict.rows} == {name}
    # The derivation itself: all gradients together err as much as the norm's bound says is expected of them.
    together, norm = (next(row for row in verdict.rows if row.kind == kind) for kind in ("gradient", "norm"))
    assert together.name == ALL and norm.bound is not None
    assert 0.5 < together.error / norm.bound < 2.0


@pytest.mark.thorough
@pytest.mark.parametrize("scales", ["row", "block"])
def test_finer_scales_of_fp8_have_a_lower_bound_and_use_it(monkeypatch: Patch, scales: str) -> None:
    """Their gradients are e4m3, whose unit is half of e5m2's; a scale off by two is then found as well."""
    job = job_of(2, dp_replicate=2)
    job = job.model_copy(update={"precision": job.precision.model_copy(update={"fp8_scales": scales})})
    verdict, coarse = check(job, "fp8"), verdict_on("fp8", 2, dp_replicate=2)
    assert verdict.ok, verdict.first_wrong
    together, norm = (next(row for row in verdict.rows if row.kind == kind) for kind in ("gradient", "norm"))
    wider = next(row for row in coarse.rows if row.kind == "norm")
    assert norm.bound is not None and wider.bound is not None and norm.bound < 0.8 * wider.bound
    assert 0.5 < together.error / norm.bound < 2.0

    multiply = fp8_scales.multiply
    forgetful = lambda left, right, dtype, **given: multiply(left, right, dtype, **given) * (1 if given else 2)  # noqa: E731
    broke = broken(job, "fp8", lambda: monkeypatch.setattr(fp8_scales, "multiply", forgetful), True)
    assert {"norm", "gradient", "update"} <= wrong(broke)


@pytest.mark.thorough
def test_a_head_in_fp8_is_one_more_product(monkeypatch: Patch) -> None:
    job = job_of(2, dp_replicate=2)
    job = job.model_copy(update={"precision": job.precision.model_copy(update={"fp8_head": True})})
    verdict, without = check(job, "fp8"), verdict_on("fp8", 2, dp_replicate=2)
    assert verdict.ok, verdict.first_wrong
    [norm, less] = [next(row for row in one.rows if row.kind == "norm") for one in (verdict, without)]
    assert norm.bound is not None and less.bound is not None and less.bound < norm.bound < 1.2 * less.bound
    scale = fp8_head._scale
    doubled = lambda x, dtype: scale(x, dtype) * (2 if dtype == fp8.FORWARD else 1)  # noqa: E731
    both = fp8_head._both_ways
    cast = lambda x, given, dtype: both(x, given / (2 if dtype == fp8.FORWARD else 1), dtype)  # noqa: E731
    monkeypatch.setattr(fp8_head, "_both_ways", cast)
    broke = broken(job, "fp8", lambda: monkeypatch.setattr(fp8_head, "_scale", doubled), True)
    assert {"loss", "norm", "gradient"} <= wrong(broke)


@pytest.mark.thorough
def test_sums_of_scores_of_extra_tokens_are_not_judged() -> None:
    """In documents of three tokens only the first has a label two tokens on, and it sees itself alone."""
    job = job_of(dp_shard=2).model_dump()
    job["model"]["extra_tokens"], job["model"]["tied"] = 1, False
    sums = {row.name for row in check(Job.model_validate(job), "bf16").rows if row.kind == "sum"}
    assert {"layers.1.attention.q.weight", "layers.2.attention.v.weight", "layers.2.joined.weight"} <= sums
    assert not {"layers.2.attention.q.weight", "layers.2.attention.k.weight"} & sums


@pytest.mark.thorough
def test_gradients_in_16_bits_are_judged_without_asking_for_sums_in_32() -> None:
    verdict = check(job_of(gradients="bf16", dp_shard=2, zero=2), "bf16")
    assert verdict.ok and set(largest_shares(verdict)) == {"loss", "norm", "gradient", "update"}


def broken(job: Job, name: str, breaking: Callable[[], None], everywhere: bool) -> Verdict:
    """The verdict after breaking something in the layout alone, or in one process too, as most mistakes are."""
    if not everywhere:
        small, _ = in_format(job, name)
        reference(small, name)
        reference(small, "float64")
    breaking()
    return check(job, name)


@pytest.mark.thorough
def test_masters_kept_in_16_bits(monkeypatch: Patch) -> None:
    update = Weights.update

    def rounding(weights: Any, optimizer: Any) -> None:
        update(weights, optimizer)
        for master in weights.masters.values():
            if master.dtype == torch.float32:
                master.data.copy_(master.data.bfloat16())

    verdict = broken(job_of(dp_shard=2), "bf16", lambda: monkeypatch.setattr(Weights, "update", rounding), True)
    assert wrong(verdict) == {"update"}


@pytest.mark.thorough
def test_a_loss_scale_that_is_not_taken_out(monkeypatch: Patch) -> None:
    clip = trainer.clip_gradients
    forgetful = lambda masters, norm, limit, scale=1.0: clip(masters, norm, limit)  # noqa: E731
    verdict = broken(
        job_of(dp_shard=2), "fp16", lambda: monkeypatch.setattr(trainer, "clip_gradients", forgetful), True
    )
    assert "update" in wrong(verdict) and "gradient" not in wrong(verdict)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}], ids=str)
def test_gradients_added_up_in_16_bits(monkeypatch: Patch, layout: dict[str, Any]) -> None:
    asked = apply._gradients
    narrow = lambda job, master: torch.bfloat16 if master == torch.float32 else asked(job, master)  # noqa: E731
    verdict = broken(job_of(**layout), "bf16", lambda: monkeypatch.setattr(apply, "_gradients", narrow), True)
    assert wrong(verdict) == {"sum"}


def test_gradients_reduced_in_16_bits(monkeypatch: Patch) -> None:
    policy = zero.MixedPrecisionPolicy

    def reducing(**settings: Any) -> Any:
        narrow = settings["param_dtype"] is not None
        return policy(**settings | ({"reduce_dtype": torch.bfloat16} if narrow else {}))

    job = job_of(batch={"global_batch": 4, "micro_batch": 2}, dp_shard=2, zero=2)
    verdict = broken(job, "bf16", lambda: monkeypatch.setattr(zero, "MixedPrecisionPolicy", reducing), True)
    assert wrong(verdict) == {"sum"}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "everywhere"), [("bf16", False), ("bf16", True), ("fp16", True), ("fp8", True)])
def test_a_term_missing_in_one_layer(monkeypatch: Patch, name: str, everywhere: bool) -> None:
    forward, calls = FeedForward.forward, count()

    def dropping(self: FeedForward, x: Tensor, draws: Any = None) -> Tensor:
        out = forward(self, x, draws)
        return out * 0.0 if out.dtype.itemsize == 2 and next(calls) % 2 else out

    verdict = broken(
        job_of(dp_shard=2), name, lambda: monkeypatch.setattr(FeedForward, "forward", dropping), everywhere
    )
    assert {"gradient", "update"} <= wrong(verdict)
    assert name == "fp8" or "loss" in wrong(verdict)


@pytest.mark.thorough
def test_an_error_that_the_format_allows_but_one_process_does_not_make(monkeypatch: Patch) -> None:
    forward, calls = Block.forward, count()

    def coarse(self: Block, *args: Any) -> Tensor:
        out = forward(self, *args)
        if out.dtype.itemsize > 2 or next(calls) % 2:
            return out
        return out + (out.to(torch.float8_e4m3fn).to(out.dtype) - out).detach()

    verdict = broken(job_of(dp_shard=2), "bf16", lambda: monkeypatch.setattr(Block, "forward", coarse), False)
    assert wrong(verdict) == {"gradient", "update"}
    together = next(row for row in verdict.rows if row.kind == "gradient")
    roundings = 2 * (2 * BLOCK_ROUNDINGS + END_ROUNDINGS)
    assert together.name == ALL and together.ok is False and together.error < 2 * math.sqrt(roundings) * UNITS["bf16"]


@pytest.mark.thorough
def test_an_fp8_gradient_without_its_scale(monkeypatch: Patch) -> None:
    scaled = fp8._scaled

    def forgetful(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *rest: Any, **more: Any) -> Any:
        doubled = right_scale * 2 if left.dtype == fp8.GRADIENT else right_scale
        return scaled(left, right, left_scale, doubled, *rest, **more)

    verdict = broken(job_of(dp_replicate=2), "fp8", lambda: monkeypatch.setattr(fp8, "_scaled", forgetful), True)
    assert {"norm", "gradient", "update"} <= wrong(verdict)


@pytest.mark.thorough
def test_a_job_s_own_format_is_judged_beside_float64() -> None:
    job = job_of(gradients="bf16", dp_shard=2)
    small, _ = shrink(job, 1)
    verdict = check_job(job, small)
    assert verdict.ok, verdict.first_wrong
    assert {row.format for row in verdict.rows} == {"", "bf16"} and "sum" not in largest_shares(verdict)
    assert any("a second run in that format" in note for note in verdict.notes)
    wide = check_job(job, small, "float32")
    assert {row.format for row in wide.rows} == {""} and "is not checked with --dtype float32" in wide.notes[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 3, "sp": False, "kv_replicate": True},
        {"cp": 2, "tp": 2},
        {"dp_shard": 2, "pp": 2},
        {"cp": 2, "cp_method": "ulysses"},
    ],
    ids=str,
)
def test_a_small_job_is_widened_for_8_bits(layout: dict[str, Any]) -> None:
    job = llama_job(**layout)
    small, notes = in_format(shrink(job)[0], "fp8")
    require_layout(small, math.prod(size for size in layout.values() if type(size) is int))
    assert small.precision.compute == "fp8" and any("head_dim 16" in note for note in notes)
    assert (small.optimizer.lr, small.optimizer.eps) == (1e-2, 1.0)


def test_heads_are_as_wide_as_gpus_take_them() -> None:
    small, notes = in_format(llama_job(tp=2), "bf16")
    assert (small.model.head_dim, small.model.width) == (8, 48) and any("head_dim 8" in note for note in notes)
    assert (small.model.ffn_width, small.batch.sequence_length) == (36, 16)
    assert in_format(small, "bf16") == (small, notes[:1])  # nothing is left to widen


def test_what_computes_in_32_bits_has_no_format_to_judge() -> None:
    assert own_format(llama_job()) is None and own_format(job_of()) == "bf16"


def test_lossy_compression_is_switched_off_with_a_note() -> None:
    small, notes = in_format(llama_job(dp_replicate=2, compress="int8"), "bf16")
    assert small.layout.compress == "none" and any('layout.compress "int8" → "none"' in note for note in notes)
