"""The bound is a bound: no prediction is below it, and a search finds what trying every layout finds."""

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
from plan_jobs import asked, nodes

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster, Layout
from meshwright.layout import require_layout
from meshwright.plan import machine_of, parse_cluster, predict, search
from meshwright.plan.bound import WORTH, bounded
from meshwright.plan.space import (
    ALLOWED,
    degrees_of,
    micro_batches_of,
    pipes_of,
    shardings_of,
    with_layout,
)

SMALL = {"layers": 5, "width": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn_width": 1536, "vocab_size": 32000}
MIXTURE = {**SMALL, "experts": {"count": 8, "top_k": 2, "ffn_width": 768, "shared_width": 512, "first_dense": 1}}
SPACES = {
    "8b on 8": (asked("llama-3-8b", 4096, 64), nodes(1)),
    "8b on 24, three stages": (asked("llama-3-8b", 4096, 96), nodes(3)),
    "70b on 1024": (asked("llama-3-70b", 8192, 512), nodes(128)),
    "405b on 16,384": (asked("llama-3.1-405b", 8192, 2048), nodes(2048)),
    "tiny on 16": (asked("llama-3-8b", 1024, 48, model=SMALL), nodes(2, "a100-80gb")),
    "learned positions on 6": (asked("gpt2", 1024, 36), Cluster(nodes=1, gpus_per_node=6, gpu="rtx-3090")),
    "measured": (asked("llama-3.2-1b", 2048, 32), parse_cluster("4xh200")),
    "adafactor in fp32, eager": (
        asked("llama-3.2-1b", 2048, 32, optimizer={"name": "adafactor"}).model_copy(
            update={"run": Job().run, "precision": Job().precision}
        ),
        nodes(1, "a100-80gb"),
    ),
    "a mixture on 16": (asked("qwen3-30b-a3b", 4096, 128), nodes(2)),
    "a mixture with dense layers": (asked("deepseek-v3", 4096, 512), nodes(32)),
    "narrow gradients": (asked("llama-3-8b", 2048, 64, optimizer={"name": "lion"}), nodes(2)),
    "extra tokens, tied": (asked("llama-3.2-1b", 2048, 64, model={"extra_tokens": 1}), nodes(2)),
}
SPACES["narrow gradients"] = (
    SPACES["narrow gradients"][0].model_copy(
        update={"precision": SPACES["narrow gradients"][0].precision.model_copy(update={"gradients": "bf16"})}
    ),
    SPACES["narrow gradients"][1],
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPACES)
def test_no_prediction_is_below_its_bound(name: str) -> None:
    """A sample of every kind of layout, those included that only a request adds."""
    job, cluster = SPACES[name]
    machine = machine_of(cluster)
    layouts = bounded(job, machine, frozenset(ALLOWED), 0.95 * machine.memory_bytes)
    seen: set[Any] = set()
    for index in Random(name).sample(range(len(layouts)), min(60, len(layouts))):
        made = layouts.job_at(index)
        seen |= {
            f"ep {made.layout.ep}",
            made.layout.schedule,
            made.precision.format,
            *made.memory.offload,
            made.layout.zero,
        }
        if layouts.is_budget(index):
            continue  # its bound is of the budget that fits: the next test
        prediction = predict(made, cluster, every_rank=False)
        assert layouts.time_s[index] <= prediction.step_s, made.layout
        assert layouts.memory_bytes[index] <= prediction.fullest.device or made.memory.recompute == "full", made.layout
    assert len(seen) >= 4


def every_layout(job: Job, cluster: Cluster) -> Iterator[Job]:
    """All layouts that the trainer accepts, tried one by one."""
    gpus = cluster.nodes * cluster.gpus_per_node
    pipes, shardings = pipes_of(job, gpus, frozenset()), shardings_of(gpus)
    for pipe, (tp, cp, ep), micro in product(pipes, degrees_of(job, gpus), micro_batches_of(job.batch.global_batch)):
        data, rest = divmod(gpus, tp * cp * pipe.pp)
        if rest or data == 0 or job.batch.global_batch % (micro * data):
            continue
        for (zero, shard), mode in product(shardings, range(3)):
            if data % shard or (zero == 0 and cp > 1) or (zero and shard * cp == 1):
                continue
            made = with_layout(job, pipe, Layout(tp=tp, cp=cp, ep=ep), micro, zero, shard, data // shard, mode)
            try:
                require_layout(made, gpus)
            except UserError:
                continue
            yield made


SEARCHED = {
    "roomy": (asked("llama-3-8b", 1024, 24, model=SMALL), Cluster(nodes=1, gpus_per_node=4, gpu="h100")),
    "three nodes of two": (
        asked("llama-3-8b", 1024, 24, model=SMALL),
        Cluster(nodes=3, gpus_per_node=2, gpu="a100-80gb"),
    ),
    "a mixture": (asked("llama-3-8b", 1024, 24, model=MIXTURE), Cluster(nodes=1, gpus_per_node=4, gpu="h100")),
    "scarce": (asked("llama-3.2-3b", 4096, 8), Cluster(nodes=2, gpus_per_node=2, gpu="rtx-3090")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_what_trying_all_of_them_finds(name: str) -> None:
    job, cluster = SEARCHED[name]
    room = 0.95 * machine_of(cluster).memory_bytes
    tried = [predict(made, cluster, every_rank=False) for made in every_layout(job, cluster)]
    fitting = sorted(one.step_s for one in tried if one.fullest.device <= room)
    found = search(job, cluster, top=3)
    assert found.exact and len(tried) > 100
    best = found.best[0].prediction.step_s
    assert best <= (1 + WORTH) * fitting[0], "a faster one was dropped"
    assert found.best[0].job.memory.recompute not in ("none", "selective", "full") or best >= fitting[0]
