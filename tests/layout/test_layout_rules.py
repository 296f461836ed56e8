"""Layouts that cannot work are refused before any process starts, with the values that would."""

from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import axes, kv_copies, kv_heads_of, most_tensor_parallel, ranks_of, require_layout

MODEL = {"heads": 6, "kv_heads": 2, "width": 48, "head_dim": 8, "ffn_width": 96, "vocab_size": 61}


def job(sequence: int = 24, batch: int = 24, model: dict[str, Any] | None = None, **layout: object) -> Job:
    return Job.model_validate(
        {
            "model": MODEL | (model or {}),
            "batch": {"sequence_length": sequence, "global_batch": batch, "micro_batch": 1},
            "layout": layout,
        }
    )


def test_axes_are_outermost_first_and_dp_may_stand_outside_pp() -> None:
    layout: dict[str, Any] = {"pp": 2, "dp_replicate": 3, "dp_shard": 4, "tp": 2, "zero": 1}
    assert list(axes(job(**layout).layout)) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert list(axes(job(**layout, order="dp-outside").layout)) == ["dp_replicate", "dp_shard", "pp", "cp", "tp"]
    assert ranks_of(job(**layout).layout) == 48


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": {"tp": 1}}, r"but layout\.tp = 1; raise it or set layout\.async_tp = false"),
        ({"layout": {"sp": False}}, r"but layout\.sp = false; set layout\.sp = true or set layout\.async_tp = false"),
        ({"run": {"compile": False}}, r"but run\.compile = false; set run\.compile = true or set layout\.async_tp"),
        ({"precision": {"compute": "fp8"}}, r'"fp8".*set precision\.compute = "bf16" or set layout\.async_tp = false'),
    ],
)
def test_asynchronous_tensor_parallelism_needs_messages_and_a_compiler(
    changes: dict[str, dict[str, Any]], sentence: str
) -> None:
    values = job(tp=2, async_tp=True).model_dump() | {"run": {"compile": True}}
    fitting = Job.model_validate(values)
    require_layout(fitting, 2)
    for section, fields in changes.items():
        values[section] = values[section] | fields
    refused = Job.model_validate(values)
    with pytest.raises(UserError, match=rf"layout\.async_tp = true .*{sentence}") as caught:
        require_layout(refused, ranks_of(refused.layout))
    assert "\n" not in str(caught.value)


def test_the_largest_tensor_parallelism_is_divided_by_every_other() -> None:
    assert most_tensor_parallel(job().model) == 6
    for tp in range(1, 13):
        fits = job(tp=tp, sp=False, kv_replicate=True)
        if 6 % tp == 0:
            require_layout(fits, tp)
        else:
            with pytest.raises(UserError, match=f"layout.tp = {tp} does not divide"):
                require_layout(fits, tp)


@pytest.mark.parametrize(
    ("layout", "ranks", "sentence"),
    [
        ({"dp_shard": 4, "zero": 1}, 6, r"layout is dp_shard 4 = 4 ranks, but there are 6; .*layout.dp_shard = 6"),
        ({"tp": 2, "dp_shard": 2, "zero": 1}, 3, r"tp 2 = 4 ranks, but there are 3; start it with 4 ranks"),
        ({}, 2, r"layout is one device = 1 rank, but there are 2"),
        ({"dp_shard": 2, "zero": 0}, 2, r"layout.zero = 0 shards nothing.*set layout.zero to 1, 2 or 3"),
        ({"tp": 4}, 4, r"layout.tp = 4 does not divide model.heads = 6; set layout.tp to one of 1, 2, 3, 6"),
        ({"tp": 3}, 3, r"layout.tp = 3 does not divide model.kv_heads = 2; .*layout.kv_replicate = true"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_sentence(layout: dict[str, Any], ranks: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(job(**layout), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "ranks", "sentence"),
    [
        ({"dp_shard": 3, "ep": 3}, 3, r"layout.ep = 3 does not divide model.experts.count = 8; set it to 1$"),
        ({"dp_shard": 2, "ep": 4}, 2, r"layout.ep = 4 does not divide layout.dp_shard · cp · tp = 2; .*one of 1, 2$"),
        ({"dp_replicate": 2, "ep": 2}, 2, r"layout.ep = 2 does not divide layout.tp \(with layout.zero = 0\) = 1"),
        ({"tp": 2, "sp": False}, 2, r"layout.tp = 2 does not divide model.experts.shared_width = 9"),
    ],
)
def test_experts_that_do_not_fit_are_one_sentence(layout: dict[str, Any], ranks: int, sentence: str) -> None:
    experts: dict[str, Any] = {"experts": {"count": 8, "top_k": 2, "ffn_width": 16, "shared_width": 9}}
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(job(model=experts, **layout), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "trains"),
    [
        ({}, False),
        ({"scores": "sigmoid"}, False),
        ({"balance_loss": 0.01}, False),
        ({"normalised": False}, True),
        ({"top_k": 2}, True),
        ({"force_balance": True}, True),
    ],
)
def test_a_router_that_gets_no_gradient_is_refused(changed: dict[str, Any], trains: bool) -> None:
    experts = {"experts": {"count": 8, "top_k": 1, "ffn_width": 16, **changed}}
    if trains:
        require_layout(job(model=experts), 1)
        return
    with pytest.raises(UserError, match=r"experts.top_k = 1 with .*normalised = true .*; set .*normalised = false, or"):
        require_layout(job(model=experts), 1)
    require_layout(job(model=experts | {"adapter": {"rank": 2}}), 1)  # whose router is not trained


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(UserError, match=r"layout.ep = 2 distributes experts, but the model has none"):
        require_layout(job(dp_shard=2, ep=2), 2)


def test_a_sequence_that_sequence_parallelism_cannot_cut() -> None:
    with pytest.raises(UserError, match=r"batch.sequence_length = 25, which layout.sp shards; set layout.sp = false"):
        require_layout(job(sequence=25, tp=2), 2)
    require_layout(job(sequence=25, tp=2, sp=False), 2)
    require_layout(job(tp=3, kv_replicate=True), 3)


def test_tensor_parallelism_asks_nothing_of_the_width() -> None:
    require_layout(job(model={"width": 50}, tp=3, kv_replicate=True), 3)


def test_ulysses_asks_that_ranks_divide_the_queries_and_copies_keys() -> None:
    assert kv_copies(job(cp=2, cp_method="ulysses")) == 1
    six = job(cp=6, cp_method="ulysses")
    require_layout(six, 6)
    assert (kv_heads_of(six), kv_copies(six)) == (2, 3)
    assert kv_copies(job(cp=2, cp_method="ulysses", tp=3, kv_replicate=True)) == 1  # tp gives each query one
    assert kv_copies(job(cp=6)) == 1
    with pytest.raises(UserError, match=r'which does not divide model.heads = 6; .*layout.cp_method = "ring"'):
        require_layout(job(cp=4, cp_method="ulysses"), 4)


def test_a_split_without_a_pipeline_is_shown_as_written() -> None:
    with pytest.raises(UserError, match=r"layout.split = \[2, 2\] is for pipelines, but layout.pp = 1"):
        require_layout(job(split=[2, 2]), 1)
