"""Questions about machines: several side by side, and how many a training needs."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job.devices import Cluster
from meshwright.plan import economy, predict
from meshwright.plan.economy import goodput_of
from meshwright.plan.target import in_nodes, target_of

MODEL = ("plan", "--model", "llama-3.2-1b", "--seq", "2048", "--batch-tokens", "1048576", "--json")


def test_clusters_are_compared_by_cost_per_token(cli: Callable[..., Any]) -> None:
    shown = json.loads(cli(*MODEL, "--compare", "8xh100@2", "8xa100-80gb@1", "2x8xh100,1xh100@3").out)
    names = [one["cluster"] for one in shown["clusters"]]
    assert names == ["8xh100", "8xa100-80gb", "2x8xh100", "1xh100"] and shown["tokens"] is None
    first, second, unpriced, alone = shown["clusters"]
    for one, price in ((first, 2), (second, 1), (alone, 3)):
        hours = 1e9 / one["tokens_per_s_per_gpu"] / 3600
        assert one["cost_per_billion_tokens"] == pytest.approx(price * hours)
    assert unpriced["cost_per_billion_tokens"] is None and unpriced["tokens_per_s"] > first["tokens_per_s"]
    assert "does not run" in cli("plan", "--model", "llama-3-70b", "--compare", "1xh100", "4x8xh100").out
    refused = cli(*MODEL, "--compare", "8xh100@cheap")
    assert refused.code == 2 and "whose price 'cheap' is not a number above 0" in refused.err


@pytest.mark.thorough
def test_the_fewest_nodes_that_end_in_time(cli: Callable[..., Any]) -> None:
    words = (*MODEL, "--cluster", "8xh100", "--tokens", "1e12", "--price", "2")
    found = json.loads(cli(*words, "--days", "4").out)
    answer, tried = found["answer"], {one["gpus"]: one["training"]["days"] for one in found["tried"] if one["gpus"]}
    assert answer["training"]["days"] <= 4
    fewer = [days for gpus, days in tried.items() if gpus < answer["gpus"]]
    assert fewer and min(fewer) > 4, "one size smaller is too slow"
    cost = answer["training"]["cost"]
    most = json.loads(cli(*words, "--budget", str(1.02 * cost)).out)["answer"]
    assert most["gpus"] >= answer["gpus"] and most["training"]["cost"] <= 1.02 * cost
    refused = cli(*words, "--days", "4", "--budget", "10")
    assert refused.code == 2 and "no number of these nodes" in refused.err
    without = cli(*MODEL, "--cluster", "8xh100", "--days", "4")
    assert without.code == 2 and "give its length with --tokens" in without.err


@pytest.mark.parametrize(
    ("spelling", "nodes", "each"),
    [
        ("8xh100", 1, 8),
        ("64xh100", 8, 8),
        ("72xgb200", 1, 72),
        ("16xgh200", 4, 4),
        ("12xh100", 2, 6),
        ("1x64xh100", 1, 64),
        ("16384xh100", 2048, 8),
        ("100000xh100", 12500, 8),
    ],
)
def test_nodes_are_as_they_are_built(spelling: str, nodes: int, each: int) -> None:
    cluster, note = in_nodes(spelling)
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, each)
    assert bool(note) == (nodes > 1)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("1x16384xh100", "16,384 GPUs per node, and at most 10,000 are possible; write the nodes too, as 2048x8xh100"),
        ("2000000x8xh100", "has 2,000,000 nodes, and at most 1,000,000 are possible"),
        ("99999999xleonardo", "has 99,999,999 nodes, and at most 1,000,000 are possible"),
        ("1000000x8xh100", "has 8,000,000 GPUs, and a plan takes at most 262,144; give fewer"),
        (f"{'9' * 5000}xh100", "is not understood"),
    ],
)
def test_more_machines_than_are_possible_are_refused(spelling: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        target_of(None, spelling)


def test_slow_storage_costs_goodput() -> None:
    """4.9 TB: written in seconds or in hours, and lost if a failure comes before."""
    from plan_jobs import asked, nodes

    layout = {"dp_shard": 2048, "tp": 8, "zero": 3}
    job = asked("llama-3.1-405b", 8192, 2048).model_copy(
        update={"layout": type(asked("gpt2", 1024, 1).layout).model_validate(layout)}
    )
    cluster = nodes(2048)
    prediction = predict(job, cluster, every_rank=False)
    told = {}
    for gb_s in (None, 2000.0, 2.0):
        where = Cluster.model_validate(
            {**cluster.model_dump(exclude_unset=True), "mtbf_hours": 3.0, "storage_gb_s": gb_s}
        )
        told[gb_s] = economy(job, prediction, where, 1e12)
    fast, slow = told[2000.0], told[2.0]
    assert 4.8e12 < fast.checkpoint_bytes < 5.0e12 and fast.write_s == pytest.approx(fast.checkpoint_bytes / 2e12)
    assert told[None].storage_guessed and told[None].write_s == pytest.approx(fast.write_s * 2000 / 2048)
    assert fast.goodput and slow.goodput and slow.goodput < 0.8 < fast.goodput
    assert slow.save_every_s == pytest.approx(slow.write_s), "no interval is shorter than a write"
    assert goodput_of(10.0, 36_000.0)[0] > goodput_of(10.0, 36_000.0, 100.0)[0]
