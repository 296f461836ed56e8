"""The messages of a rehearsed rank, compared with those that its plan charges for."""

from dataclasses import replace
from typing import Any

import pytest
from rehearsed_jobs import a_job, as_planned, cluster_of, message

from meshwright.job import Job, model_preset
from meshwright.job.devices import Cluster
from meshwright.layout import ranks_of
from meshwright.pipeline import build_table
from meshwright.rehearse import compose
from meshwright.rehearse.charges import differences, planned_bytes, recorded_bytes, sends_of

PARAMETERS = 8.03e9  # of Llama 3 8B


def test_zero_3_gathers_twice_and_scatters_once_per_micro_batch() -> None:
    job = a_job(batch=32, layout={"dp_shard": 16, "zero": 3})
    [rank], cluster = as_planned(job, cluster_of(job)), cluster_of(job)
    layer = PARAMETERS / 32
    own = (
        message("all_gather", "dp_shard", 16, 2 * layer, 2 * 2 * 32),
        message("reduce_scatter", "dp_shard", 16, 4 * layer, 2 * 32),
        message("all_reduce", "dp_shard", 16, 8, 3),
    )
    assert recorded_bytes(job, own) == pytest.approx(planned_bytes(job, cluster, 0), rel=1e-3)
    assert differences(job, cluster, replace(rank, messages=own)) == ()
    once = replace(rank, messages=own[1:])
    [sentence] = differences(job, cluster, once)
    assert "rank 0 passes on 56.1 GiB per step to data-parallel ranks, and the plan charges for 112 GiB" in sentence
    _, warnings = compose(job, cluster, [once], "NVIDIA H100 80GB HBM3")
    assert sentence in warnings


def test_messages_of_tensor_and_pipeline_parallel_ranks() -> None:
    job = a_job(batch=32, layout={"tp": 4, "pp": 2, "split": [16, 16], "dp_shard": 2, "zero": 1})
    cluster, [first, last] = cluster_of(job), as_planned(job, cluster_of(job))
    stream, micro_batches = 2 * 4096 * 4096, 16
    shared = tuple(message(kind, "tp", 4, stream, micro_batches * 16 * 4) for kind in ("all_gather", "reduce_scatter"))
    sent = message("send", "pp", 2, stream / 4, micro_batches)
    weights = PARAMETERS / 2 / 4
    data = message("reduce_scatter", "dp_shard", 2, 4 * weights), message("all_gather", "dp_shard", 2, 2 * weights)
    received = replace(sent, kind="recv")
    for rank in (first, last):
        own = replace(rank, messages=(*shared, *data, sent, received))
        assert differences(job, cluster, own) == ()
    [sentence] = differences(job, cluster, replace(last, messages=(*shared, *data, replace(sent, count=32))))
    assert "rank 8 passes on 256 MiB per step to pipeline ranks, and the plan charges for 128 MiB" in sentence
    [sentence] = differences(job, cluster, replace(first, messages=(*shared, shared[0], *data, sent)))
    assert "to tp and cp ranks" in sentence


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_messages_of_ranks_that_share_sequences(method: str) -> None:
    layout = {"cp": 4, "cp_method": method, "dp_shard": 2, "zero": 3}
    job = a_job("llama-3.1-8b", batch=2, sequence=32768, layout=layout)
    cluster, [rank] = cluster_of(job), as_planned(job, cluster_of(job))
    layer, tokens = PARAMETERS / 32, 32768 // 4
    data = (
        message("all_gather", "dp_shard·cp", 8, 2 * layer, 2 * 32),
        message("reduce_scatter", "dp_shard·cp", 8, 4 * layer, 32),
    )
    keys = 2 * 2 * tokens * 8 * 128
    ahead = {
        "ring": message("send", "cp", 2, keys, 32 * 3 * (1 + 3)),
        "allgather": message("all_gather", "cp", 4, keys * 4, 32 * (1 + 3)),
        "ulysses": message("all_to_all", "cp", 4, 2 * tokens * (2 * 32 + 2 * 8) * 128, 32 * 2),
    }[method]
    assert differences(job, cluster, replace(rank, messages=(*data, ahead))) == ()
    assert len(differences(job, cluster, replace(rank, messages=data))) == 1


def test_rows_on_their_way_to_experts() -> None:
    job = a_job("qwen3-30b-a3b", batch=16, layout={"dp_shard": 16, "ep": 8, "zero": 3})
    cluster, [rank] = cluster_of(job), as_planned(job, cluster_of(job))
    rows = message("all_to_all", "ep", 8, 2 * 4096 * 8 * 2048 * 1.15, 48 * 4)
    recorded, planned = recorded_bytes(job, (rows,)), planned_bytes(job, cluster, rank.pipeline_rank)
    assert recorded["expert-parallel"] == pytest.approx(planned["expert-parallel"], rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"])
def test_every_message_between_stages_is_sent_by_one_of_them(schedule: str) -> None:
    table = build_table(schedule, 4, 8)
    assert sum(sends_of(table, rank) for rank in range(4)) == table.transfers


# What ranks of a small model issued when they were rehearsed: kind, axis, ranks, bytes, count per step.
SMALL = {"vocab_size": 512, "width": 128, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_width": 384}
RECORDED: dict[str, tuple[dict[str, Any], str, list[tuple[str, str, int, int, int]]]] = {
    "replicas are summed over once a step": (
        {"dp_shard": 2, "dp_replicate": 2, "zero": 3},
        "none",
        [
            *(("all_gather", "dp_shard", 2, size, count) for size, count in ((512, 2), (262144, 8), (787456, 16))),
            *(("reduce_scatter", "dp_shard", 2, size, count) for size, count in ((512, 2), (262144, 4), (787456, 8))),
            *(("all_reduce", "dp_replicate", 2, size, count) for size, count in ((256, 1), (131072, 2), (393728, 4))),
        ],
    ),
    "selective recomputation repeats sums over tensor-parallel ranks": (
        {"tp": 4},
        "selective",
        [("reduce_scatter", "tp", 4, 65536, 176), ("all_gather", "tp", 4, 65536, 208)],
    ),
    "and so it does without sequence parallelism": (
        {"tp": 4, "sp": False},
        "selective",
        [("all_reduce", "tp", 4, 65536, 176)],
    ),
    "embedding and head": (
        {"tp": 4},
        "none",
        [("reduce_scatter", "tp", 4, 65536, 144), ("all_gather", "tp", 4, 65536, 144)],
    ),
    "gradients between the two copies of a model": (
        {"pp": 2, "dp_shard": 2, "zero": 1, "schedule": "dualpipe"},
        "none",
        [
            *(("all_gather", "dp_shard", 2, size, count) for size, count in ((512, 1), (262144, 2), (787456, 4))),
            *(("reduce_scatter", "dp_shard", 2, size, count) for size, count in ((512, 1), (262144, 2), (787456, 4))),
            *(("send", "pp", 2, size, count) for size, count in ((65536, 4), (131072, 2), (256, 9), (32768, 8))),
            *(("send", "pp", 2, size, count) for size, count in ((16384, 8), (98304, 12))),
        ],
    ),
    "keys and their gradients in fp32": (
        {"cp": 4, "dp_shard": 2, "zero": 3},
        "none",
        [
            ("send", "cp", 2, 16384, 144),
            *(("all_gather", "world", 8, size, count) for size, count in ((512, 4), (262144, 16), (787456, 32))),
            *(("reduce_scatter", "world", 8, size, count) for size, count in ((512, 4), (262144, 8), (787456, 16))),
        ],
    ),
}


@pytest.mark.parametrize("what", RECORDED)
def test_the_plan_charges_for_what_small_ranks_sent(what: str) -> None:
    layout, recompute, messages = RECORDED[what]
    model = {**model_preset("tiny-llama"), **SMALL}
    sizes = {"sequence_length": 128, "global_batch": 8, "micro_batch": 1}
    job = Job.model_validate({"model": model, "layout": layout, "batch": sizes, "memory": {"recompute": recompute}})
    cluster = Cluster(nodes=1, gpus_per_node=ranks_of(job.layout), gpu="h100")
    recorded = recorded_bytes(job, [message(*one) for one in messages])
    assert recorded == pytest.approx(planned_bytes(job, cluster, 0), rel=2e-3)
