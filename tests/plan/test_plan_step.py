"""A step's time: its parts add up, its FLOPs are the model's, and layouts compare as they should."""

import random
from dataclasses import replace

import pytest
from plan_jobs import llama, nodes

from meshwright.cost import block_cost
from meshwright.errors import UserError
from meshwright.job.devices import Cluster
from meshwright.pipeline import StageTimes, build_table, simulate
from meshwright.plan import MESHWRIGHT, machine_of, parse_cluster, predict
from meshwright.plan.communication import Group, Wires, all_gather_s, all_reduce_s, group_of
from meshwright.plan.compute import products_of
from meshwright.plan.simulate import play, shortened

CLUSTER = parse_cluster("8xh100")
BATCH = {"sequence_length": 4096, "global_batch": 64, "micro_batch": 1}


def test_products_have_the_flops_the_model_counts() -> None:
    job = llama(batch={"sequence_length": 512, "global_batch": 2, "micro_batch": 2})
    cost = block_cost(job.model, 2, 512, 2)
    projections = sum(2 * rows * columns * inner for rows, columns, inner in products_of(job, MESHWRIGHT))
    attention = 4 * 2 * 512 * 512 * job.model.heads * job.model.head_dim
    assert projections + attention == cost.forward_flops


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "virtual"),
    [
        ("1f1b", 4, 43, None),
        ("gpipe", 3, 30, None),
        ("interleaved", 4, 48, 3),
        ("zb-h1", 6, 60, None),
        ("zb-v", 4, 40, None),
    ],
)
def test_long_tables_are_played_short(schedule: str, ranks: int, micro_batches: int, virtual: int | None) -> None:
    table = build_table(schedule, ranks, micro_batches, virtual)
    random.seed(0)
    forward = [1 + random.random() / 5 for _ in range(table.stages)]
    halves = [0.8 + random.random() / 5 for _ in range(table.stages)]
    whole = simulate(table, StageTimes(forward, [2 * half for half in halves], halves, halves, 0.1))
    seconds = [(f, 2 * half, half, half) for f, half in zip(forward, halves, strict=True)]
    played = play(schedule, ranks, micro_batches, virtual, seconds, 0.1)
    assert shortened(ranks, micro_batches) < micro_batches
    assert played.makespan_s == pytest.approx(whole.makespan_s, rel=5e-3)
    assert played.busy_s == pytest.approx(max(whole.busy_s))


def test_phases_add_up_to_the_step() -> None:
    job = llama(batch=BATCH, layout={"dp_shard": 2, "zero": 1, "tp": 2, "pp": 2})
    prediction = predict(job, nodes(1))
    assert prediction.step_s == pytest.approx(sum(prediction.phases.values()))
    assert prediction.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / prediction.step_s / 8)
    assert all(seconds >= 0 for seconds in prediction.phases.values())


def test_recomputation_costs_a_forward() -> None:
    none, full = (
        predict(llama(batch=BATCH, memory={"recompute": mode}, layout={"dp_shard": 8}), nodes(1))
        for mode in ("none", "full")
    )
    forward = sum(none.phases[f"forward {kind}"] for kind in ("products", "attention"))
    assert full.phases["recomputation"] == pytest.approx(forward, rel=0.25)
    assert full.step_s > none.step_s


def test_pairs_pass_through_the_head_twice() -> None:
    text, pairs = (
        predict(llama(batch=BATCH, layout={"dp_shard": 8}, data={"format": form, "packing": "best-fit"}), nodes(1))
        for form in ("text", "preferences")
    )
    job = llama(batch=BATCH)
    head = 2 * job.model.width * job.model.vocab_size / (2 * 8.03e9)  # of the forward's products, about
    more = pairs.phases["forward products"] / text.phases["forward products"] - 1
    assert more == pytest.approx(head, rel=0.3) and pairs.step_s > text.step_s
    assert {name: pairs.phases[name] for name in pairs.phases if "backward" in name} == {
        name: text.phases[name] for name in text.phases if "backward" in name
    }


def test_tensor_parallelism_falls_past_the_node() -> None:
    """Twice the ranks inside the node lose little of a GPU's rate, past it a third and more."""

    def rate(tp: int) -> float:
        cluster = Cluster(nodes=-(-tp // 8), gpus_per_node=min(tp, 8), gpu="h100")
        return predict(llama("llama-3-70b", batch=BATCH, layout={"tp": tp}), cluster).tokens_per_s_per_gpu

    assert rate(8) > 0.8 * rate(4)
    assert rate(16) < 0.67 * rate(8)


def test_zero_3_against_2_turns_with_the_network() -> None:
    """Gathering for every micro-batch is hidden by a fast network and not by a slow one."""

    def slower(network: float) -> float:
        cluster = nodes(8).model_copy(update={"links": {"network": network}})
        batch = {**BATCH, "global_batch": 256}
        two, three = (
            predict(llama(batch=batch, layout={"dp_shard": 64, "zero": zero}), cluster).step_s for zero in (2, 3)
        )
        return three / two

    assert slower(400.0) < 1.1
    assert slower(10.0) > 1.3


def test_what_is_not_gathered_ahead_is_waited_for() -> None:
    def step_s(prefetch: int) -> float:
        layout = {"dp_shard": 8, "zero": 3, "prefetch": prefetch}
        return predict(llama(batch=BATCH, layout=layout), CLUSTER).phases["parameter and gradient transfers"]

    assert step_s(0) > 2 * step_s(1)


def test_an_mfu_in_fp8_is_of_bf16_s_peak() -> None:
    plans = [
        predict(llama(batch=BATCH, layout={"dp_shard": 8, "zero": 2}, precision={"compute": compute}), CLUSTER)
        for compute in ("bf16", "fp8")
    ]
    for one in plans:
        assert one.mfu == pytest.approx(one.model_flops_per_s_per_gpu / 989.4e12)


def test_more_micro_batches_shrink_the_bubble() -> None:
    def bubble(batch: int) -> float:
        job = llama(batch={**BATCH, "global_batch": batch}, layout={"pp": 8})
        prediction = predict(job, nodes(1))
        return prediction.phases["pipeline bubble and sends"] / prediction.step_s

    assert bubble(8) > 0.4 > 0.2 > bubble(64)


def test_rings_cost_what_their_links_carry() -> None:
    wires = Wires(8, 300e9, 0.0, 25e9, 0.0)
    assert all_reduce_s(wires, group_of(8, 1, 8), 8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 300e9)
    assert all_gather_s(wires, group_of(2, 8, 8), 2e9) == pytest.approx(
        1e9 / 25e9
    )  # one GPU of each node: its own card
    assert all_gather_s(wires, group_of(16, 1, 8), 16e9) == pytest.approx(15e9 / 200e9)  # a node's eight cards together
    assert group_of(4, 2, 8) == Group(4, 4) and group_of(16, 2, 8) == Group(16, 4) and group_of(4, 8, 8) == Group(4, 1)


def test_clusters_are_spelled_and_guesses_told() -> None:
    cluster = parse_cluster("16x8xa100-80gb")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu) == (16, 8, "a100-80gb")
    assert any("network" in guess for guess in machine_of(cluster).guessed)
    assert not any("network" in guess for guess in machine_of(parse_cluster("8xa100-80gb")).guessed)
    for wrong, word in (("eight", "--cluster"), ("8xh99", "h99")):
        with pytest.raises(UserError, match=word):
            parse_cluster(wrong)


def test_mistakes_are_named() -> None:
    job = llama(batch=BATCH, layout={"dp_shard": 8})
    with pytest.raises(UserError, match="layout needs 8 ranks, but the cluster has 16"):
        predict(job, nodes(2))
    with pytest.raises(UserError, match=r"cluster\.gpu is not given"):
        predict(job, Cluster(gpus_per_node=8))
    with pytest.raises(UserError, match=r"cluster\.links has 'ethernet'"):
        predict(job, nodes(1).model_copy(update={"links": {"ethernet": 1.0}}))


@pytest.mark.parametrize("spelling", ["0xh100", "0x8xh100"])
def test_a_cluster_has_a_gpu(spelling: str) -> None:
    with pytest.raises(UserError, match=f"--cluster = {spelling} has no GPU; write at least one node"):
        parse_cluster(spelling)


def test_a_gpu_may_be_spelt_without_its_hyphens() -> None:
    assert parse_cluster("2xrtx3090").gpu == "rtx-3090"


def test_compute_slows_down_beside_collectives() -> None:
    """Hidden gradients cost the last block's, which nothing hides, and 18.9% of the time that compute ran beside."""
    job = llama(batch={"sequence_length": 4096, "global_batch": 16, "micro_batch": 2}, layout={"dp_replicate": 8})
    alone = replace(MESHWRIGHT, gradient_overlap=False)
    waited, hidden = (predict(job, nodes(1), one).phases["gradient reduction"] for one in (alone, MESHWRIGHT))
    assert hidden == pytest.approx(waited / job.model.layers + 0.189 * waited, rel=1e-6)
