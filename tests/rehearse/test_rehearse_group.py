"""The process group of a rank without others: what arrives is finite, of the right scale and there at once."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from math import sqrt
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.world import World, all_gather
from meshwright.rehearse.group import NAME, SPREAD, RehearsedGroup, register
from meshwright.runs.rank_zero import from_rank_zero, on_rank_zero

RANK, SIZE = 2, 4


@pytest.fixture
def group() -> RehearsedGroup:
    return RehearsedGroup(None, RANK, SIZE, timedelta(seconds=1))


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that is rank 2 of 4."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _join) as process:
        yield lambda function, *given: process.submit(function, *given).result()


def _join() -> None:
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(SIZE), LOCAL_RANK="0")
    register()
    dist.init_process_group(NAME, store=dist.HashStore(), rank=RANK, world_size=SIZE)


def summed() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return options


def test_a_gather_repeats_the_own_share_even_where_it_is_a_part_of_the_output(group: RehearsedGroup) -> None:
    output = torch.zeros(SIZE, 3)
    output[RANK] = torch.arange(3.0)
    group._allgather_base(output, output[RANK]).wait()
    assert output.tolist() == [[0.0, 1.0, 2.0]] * SIZE


def test_a_sum_of_numbers_grows_as_independent_ones_and_a_sum_of_counts_as_equal_ones(group: RehearsedGroup) -> None:
    numbers, counts, scalars = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    group.allreduce([numbers, counts, scalars], summed())
    assert numbers.tolist() == pytest.approx([sqrt(SIZE)] * 2)
    assert counts.tolist() == scalars.tolist() == [SIZE] * 2
    highest = dist.AllreduceOptions()
    highest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([numbers], highest)
    assert numbers.tolist() == pytest.approx([sqrt(SIZE)] * 2)


def test_a_reduce_scatter_gives_the_own_part(group: RehearsedGroup) -> None:
    output = torch.empty(2)
    options = dist.ReduceScatterOptions()
    group._reduce_scatter_base(output, torch.arange(8.0), options)
    assert output.tolist() == [4.0 * sqrt(SIZE), 5.0 * sqrt(SIZE)]


def test_every_rank_sends_as_many_tokens_to_this_ranks_experts_as_itself(group: RehearsedGroup) -> None:
    counts = torch.arange(8).view(SIZE, 2)
    arriving = torch.empty_like(counts)
    group.alltoall_base(arriving, counts, [], [])
    assert arriving.tolist() == [[4, 5]] * SIZE


@pytest.mark.parametrize("sent", [0, 2, 7])
def test_rows_that_arrive_are_the_own_ones_however_many(group: RehearsedGroup, sent: int) -> None:
    rows, arrived = torch.randn(sent, 3), torch.full((5, 3), torch.nan)
    group.alltoall_base(arrived, rows, [2, 3, 0, 0], [sent, 0, 0, 0])
    assert arrived.isfinite().all()
    if sent:
        assert all(any(torch.equal(row, own) for own in rows) for row in arrived)


def test_received_rows_are_small_and_differ_and_leave_the_ranks_own_chance_alone(group: RehearsedGroup) -> None:
    before = torch.get_rng_state()
    received = torch.full((64, 8), torch.nan, dtype=torch.bfloat16, requires_grad=True)
    group.recv([received], 1)
    assert received.isfinite().all() and received.abs().max() <= 1.01 * SPREAD
    assert len({tuple(row) for row in received.tolist()}) == 64
    assert torch.equal(torch.get_rng_state(), before)
    vote = torch.zeros(1, dtype=torch.int32)
    group.recv([vote], 1)
    assert vote.item() == 1


def _objects() -> tuple[Any, ...]:
    world = World(torch.device("cpu"), RANK, SIZE)
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK})
    return gathered, from_rank_zero(world, "own"), on_rank_zero(world, lambda: 1 / 0)


def test_objects_of_others_are_the_own(apart: Callable[..., Any]) -> None:
    """Also those that rank 0 sends, which this rank never sees."""
    assert apart(_objects) == ([{"rank": RANK}] * SIZE, "own", None)


def _through_torch() -> list[list[float]]:
    output = torch.empty(SIZE)
    all_gather(output, torch.ones(1))
    work = dist.all_reduce(same := torch.ones(1), dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    work.wait()
    part = dist.new_group([0, RANK])
    dist.all_reduce(pair := torch.ones(1, dtype=torch.int64), group=part)
    operations = [dist.P2POp(dist.isend, same, 3), dist.P2POp(dist.irecv, message := torch.full((1,), torch.nan), 1)]
    for sent in dist.batch_isend_irecv(operations):
        sent.wait()
    dist.barrier()
    assert message.isfinite().all()
    return [output.tolist(), same.tolist(), pair.tolist()]


def test_torchs_calls_reach_it(apart: Callable[..., Any]) -> None:
    assert apart(_through_torch) == [[1.0] * SIZE, [1.0], [2]]
