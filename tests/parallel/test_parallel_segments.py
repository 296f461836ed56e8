"""Segments of blocks that are recomputed together: where they begin, what they gather, what they restore."""

from typing import Any

import pytest
import torch
from test_parallel_recompute import MODEL, make_job, peak_of_a_step
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost import segments_of
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import recompute_modes, require_layout, stages_of_rank, table_of
from meshwright.parallel import build, join_world
from meshwright.plan.memory import block_bytes
from meshwright.plan.software import MESHWRIGHT
from meshwright.verify import run_ranks


def test_segments_begin_with_each_stage() -> None:
    """Two stages per rank with split 3, 2, 1, 2; every rank says the same of all."""
    job = make_job({"segments": 2}, pp=2, schedule="interleaved", split=[3, 2, 1, 2], model={"layers": 8})
    s, j = "segment", "joined"
    for rank in range(2):
        assert list(recompute_modes(job, table_of(job), rank).values()) == [s, j, s, s, j, s, s, j]
    assert set(recompute_modes(make_job({"segments": 1}), None, 0).values()) == {"full"}


def test_a_model_that_calls_its_blocks_itself_has_no_segments() -> None:
    require_layout(make_job({"segments": 1}, model={"file": "mine.py"}), 1)
    with pytest.raises(UserError, match=r'mine.py calls its blocks itself; set memory.recompute = "full"'):
        require_layout(make_job({"segments": 2}, model={"file": "mine.py"}), 1)


class Gathers(TorchDispatchMode):
    """Counts collectives that gather parameters."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_allgather_base" in str(func)
        return func(*args, **(kwargs or {}))


def gathers_of_a_step(jobs: list[Job]) -> list[int]:
    """How often a rank gathers parameters in a second step's forward and backward, and what stays gathered."""
    world = join_world(jobs[0], torch.device("cpu"))
    counts = []
    for job in jobs:
        engine, _ = build(job, world)
        [model] = engine.modules
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        model(tokens, tokens, 16).backward()
        with Gathers() as gathers:
            model(tokens, tokens, 16).backward()
        counts.append(gathers.count)
        assert all(isinstance(parameter, DTensor) for parameter in model.layers.parameters())
    return counts


@pytest.mark.thorough
def test_a_segment_gathers_its_parameters_once_for_recomputation_and_backward() -> None:
    kinds: list[Any] = ["none", "full", {"segments": 3}, {"segments": 4}]
    jobs = [make_job(kind, dp_shard=2, zero=3, prefetch=ahead) for ahead in (0, 1, 2) for kind in kinds]
    for counts in run_ranks(gathers_of_a_step, 2, jobs):
        assert len(set(counts)) == 1 and counts[0] >= 2 * MODEL["layers"], counts


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_a_segment_restores_what_the_planner_says(blocks: int) -> None:
    """Its blocks as without recomputation, all at once, next to the inputs of the segments."""
    job = make_job({"segments": blocks}, model={"layers": 7})
    [(_, stage)] = stages_of_rank(job, None, 0)
    modes = list(recompute_modes(job, None, 0).values())
    sizes = [block_bytes(job, MESHWRIGHT, mode) for mode in modes]
    kept = sum(size for size, _ in sizes)
    restored = max(sum(sizes[place][1] for place in segment) for segment in segments_of(modes))
    assert kept == -(-7 // blocks) * 32 * 32 * 4
    assert 0.8 * (stage.fixed + kept + restored) < peak_of_a_step(job) <= stage.fixed + kept + restored
