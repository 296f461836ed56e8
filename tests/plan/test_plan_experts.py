"""Mixtures of experts in plans: transfers and memory by hand, and what more ranks change."""

from typing import Any

import pytest
from plan_jobs import asked, llama, nodes

from meshwright.cost import active_parameters, parameter_count
from meshwright.job import Job
from meshwright.layout import require_layout
from meshwright.plan import predict, search
from meshwright.plan.communication import Group, Wires
from meshwright.plan.experts import IMBALANCE, dispatch_s
from meshwright.plan.software import MEGATRON_CORE, MESHWRIGHT

EIGHT = {"count": 8, "top_k": 2, "ffn_width": 4096}


def mixture(layout: dict[str, Any], experts: dict[str, Any] | None = None, **sections: Any) -> Job:
    """An 8B Llama whose feed-forward is eight experts."""
    sizes = {"sequence_length": 4096, "global_batch": 64, "micro_batch": 1}
    return llama(model={"experts": EIGHT | (experts or {})}, layout=layout, batch=sizes, **sections)


def test_rows_travel_as_many_bytes_as_they_have() -> None:
    """4096 tokens of 4096 numbers of two bytes to two of eight experts: an eighth stays here, the rest is sent."""
    wires = Wires(8, 100e9, 0.0, 25e9, 0.0)
    job = mixture({"dp_shard": 8, "zero": 1, "ep": 8}, {"force_balance": True})
    sent = 4096 * 4096 * 2 * 2 * 7 / 8
    assert dispatch_s(job, wires, Group(8, 8), MESHWRIGHT) == pytest.approx(sent / 100e9)
    # Over two nodes of four, half of the rows leave the node and three of eight stay in it: the network is slower.
    assert dispatch_s(job, wires, Group(8, 4), MESHWRIGHT) == pytest.approx(sent * 8 / 7 / 2 / 25e9)
    learned = mixture({"dp_shard": 8, "zero": 1, "ep": 8})
    assert dispatch_s(learned, wires, Group(8, 8), MESHWRIGHT) == pytest.approx(IMBALANCE * sent / 100e9)


def test_a_token_that_is_sent_once_to_each_rank_travels_less() -> None:
    """With two experts on one of two ranks in a quarter of the cases: 1.5 ranks a token, and half of them this one."""
    wires = Wires(2, 100e9, 0.0, 25e9, 0.0)
    job = mixture({"dp_shard": 2, "zero": 1, "ep": 2}, {"force_balance": True})
    token = 4096 * 4096 * 2
    assert dispatch_s(job, wires, Group(2, 2), MEGATRON_CORE) == pytest.approx(1.5 / 2 * token / 100e9)
    assert dispatch_s(job, wires, Group(2, 2), MESHWRIGHT) == pytest.approx(2 / 2 * token / 100e9)


def test_states_of_experts_are_shared_by_all_their_ranks() -> None:
    """Whatever ep is, a rank's states are the same share of all parameters; the working copies are not."""
    terms = []
    for ep in (1, 2, 8):
        prediction = predict(mixture({"dp_shard": 8, "zero": 1, "ep": ep}), nodes(1))
        terms.append(prediction.fullest.terms)
    parameters = parameter_count(mixture({}).model)
    for one in terms:
        assert one["optimizer states"] == pytest.approx(8.0 * parameters / 8, rel=1e-3)
    experts = parameters - active_parameters(mixture({}, {"top_k": 1}).model)  # seven of eight
    saved = terms[0]["working weights"] - terms[1]["working weights"]
    assert saved == pytest.approx(2.0 * experts * 8 / 7 / 2, rel=1e-3)


def test_experts_of_tensor_parallel_ranks_are_shards_of_theirs() -> None:
    one = predict(mixture({"tp": 4, "dp_shard": 2, "zero": 1}), nodes(1)).fullest.terms
    other = predict(mixture({"tp": 4, "dp_shard": 2, "zero": 1, "ep": 4}), nodes(1)).fullest.terms
    assert one["optimizer states"] == pytest.approx(other["optimizer states"])
    assert other["working weights"] < 0.5 * one["working weights"]


def test_more_experts_of_the_same_total_cost_no_more_flops_but_more_memory_traffic() -> None:
    few, many = (
        predict(mixture({"dp_shard": 8, "zero": 3, "ep": 8}, {"count": count, "force_balance": True}), nodes(1))
        for count in (8, 64)
    )
    assert many.step_s > few.step_s
    assert many.fullest.terms["optimizer states"] > 4 * few.fullest.terms["optimizer states"]


def test_what_is_assumed_of_the_load_is_told() -> None:
    (guess,) = [
        one for one in predict(mixture({"dp_shard": 8, "zero": 1, "ep": 8}), nodes(1)).guessed if "experts" in one
    ]
    assert f"{IMBALANCE:g} times the mean" in guess
    forced = predict(mixture({"dp_shard": 8, "zero": 1, "ep": 8}, {"force_balance": True}), nodes(1))
    assert any("equally loaded" in one for one in forced.guessed)


def test_a_capacity_is_not_modelled_and_said_to_be() -> None:
    told = predict(mixture({"dp_shard": 8, "zero": 1}, {"capacity": 1.25}), nodes(1)).not_modelled
    assert told == ("model.experts.capacity = 1.25: rows are counted as without it, neither dropped nor padded",)
    assert predict(mixture({"dp_shard": 8, "zero": 1}), nodes(1)).not_modelled == ()


@pytest.mark.thorough
def test_a_search_spreads_experts_that_do_not_fit_otherwise() -> None:
    found = search(asked("mixtral-8x7b", 4096, 128), nodes(4))
    assert found.best and found.best[0].job.layout.ep > 1
    for one in found.best:
        require_layout(one.job, 32)
