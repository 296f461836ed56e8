"""The comparison alone: what counts as equal, and every way of not being so."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.parallel import ShardIndex
from meshwright.verify import Comparison, Observation, Shard, compare
from meshwright.verify.compare import zero_gradients

WEIGHT = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 0.5]], dtype=torch.float64)
ZERO = torch.full((2,), 1e-19, dtype=torch.float64)


def whole(values: Tensor) -> Shard:
    return Shard(ShardIndex(torch.arange(values.shape[0]), None, tuple(values.shape), 1), values)


def rows_of(values: Tensor, start: int, stop: int) -> Shard:
    """Rows start to stop, those past the end being padding."""
    rows = torch.arange(start, stop)
    index = ShardIndex(rows, None, tuple(values.shape), 1)
    return Shard(index, index.take(values))


def observation(weight: Shard, zero: Shard | None = None) -> Observation:
    tensors = {"weight": weight, "bias": zero or whole(ZERO)}
    return Observation([2.0, 1.0], [0.5, 0.25], [3.0], gradients=dict(tensors), updates=dict(tensors))


REFERENCE = observation(whole(WEIGHT))
FIRST, SECOND = observation(rows_of(WEIGHT, 0, 2)), observation(rows_of(WEIGHT, 2, 4))


def wrong(ranks: list[Observation], dtype: str = "float64") -> list[Comparison]:
    return [row for row in compare(ranks, REFERENCE, dtype) if row.ok is False]


def test_shards_that_make_up_the_whole_are_equal() -> None:
    rows = compare([FIRST, SECOND], REFERENCE, "float64")
    assert all(row.ok for row in rows)
    assert [row.kind for row in rows] == ["loss"] * 2 + ["norm"] * 2 + ["evaluation"] + ["gradient"] * 2 + [
        "update"
    ] * 2


def test_one_entry_off_is_found_and_measured_against_the_largest() -> None:
    spoilt = WEIGHT.clone()
    spoilt[2, 1] += 5e-6
    off = replace(SECOND, gradients=SECOND.gradients | {"weight": rows_of(spoilt, 2, 4)})
    (row,) = wrong([FIRST, off])
    assert (row.kind, row.name) == ("gradient", "weight")
    assert row.error == pytest.approx(1e-6)
    assert wrong([FIRST, off], "float32") == []  # float32's bound is wider
    assert [row.ok for row in compare([FIRST, off], REFERENCE, "float32") if row.kind == "update"] == [None, None]


def test_entries_that_no_rank_holds_are_missed() -> None:
    short = observation(rows_of(WEIGHT, 0, 2))
    assert {row.note for row in wrong([FIRST, short])} == {"2 of 6 entries are held by no rank"}


def test_a_parameter_that_no_rank_holds_or_that_should_not_be_there() -> None:
    without = replace(FIRST, gradients={"bias": whole(ZERO)})
    assert [row.name for row in wrong([without])][:1] == ["weight"]
    more = replace(FIRST, gradients=FIRST.gradients | {"stray": whole(ZERO)})
    assert "stray" in [row.name for row in wrong([more, SECOND])]


def test_replicas_that_differ_are_seen_whichever_comes_last() -> None:
    drifted = observation(whole(WEIGHT * 1.01))
    for ranks in ([drifted, REFERENCE], [REFERENCE, drifted]):
        assert {row.name for row in wrong(ranks)} == {"weight"}


def test_padding_must_stay_zero() -> None:
    shard = rows_of(WEIGHT, 2, 4)
    dirty = Shard(shard.index, shard.values + torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert wrong([FIRST, replace(SECOND, updates=SECOND.updates | {"weight": dirty})])


def test_a_gradient_that_is_zero_by_mathematics_may_hold_rounding_and_no_more() -> None:
    rounding, real = whole(-3 * ZERO), whole(ZERO + 1e-6)
    assert wrong([observation(whole(WEIGHT), rounding)]) == []
    assert wrong([observation(whole(WEIGHT), real)])


@pytest.mark.parametrize("field", ["losses", "norms"])
def test_nan_and_missing_steps_are_never_equal(field: str) -> None:
    for values in ([math.nan, 1.0], [2.0]):
        change: dict[str, Any] = {field: values}
        assert wrong([REFERENCE, replace(REFERENCE, **change)])


def test_a_shard_of_another_shape_is_not_equal() -> None:
    assert "shape" in wrong([observation(whole(WEIGHT.T.contiguous()))])[0].note


def test_in_float32_such_a_gradient_is_measured_against_the_largest() -> None:
    assert zero_gradients(REFERENCE) == {"bias"}
    rounding, real = (observation(whole(WEIGHT), whole(ZERO + value)) for value in (1e-8, 1e-3))
    gradients = [r for r in compare([rounding], REFERENCE, "float32", {"bias"}) if r.kind == "gradient"]
    assert all(row.ok for row in gradients)
    assert not all(row.ok for row in compare([real], REFERENCE, "float32", {"bias"}) if row.kind == "gradient")


def test_gradients_that_are_all_zero_are_compared() -> None:
    """A step without a picture gives a projector that is trained alone no gradient at all."""
    none = {name: replace(shard, values=torch.zeros_like(shard.values)) for name, shard in REFERENCE.gradients.items()}
    still = replace(REFERENCE, gradients=none)
    assert all(row.error == 0 for row in compare([still], still, "float64") if row.kind == "gradient")
    assert any(row.ok is False for row in compare([REFERENCE], still, "float64") if row.kind == "gradient")
