"""The collective contract: everything is recorded, what is in order passes, and each planted violation is named."""

import contextlib
import faulthandler
import json
import re
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from verify_jobs import llama_job
from waiting import LIMIT_S, wait_until

from meshwright.parallel.context.order import Order
from meshwright.parallel.world import World
from meshwright.verify import RankError, RankGroup, check, run_ranks
from meshwright.verify.check import reference
from meshwright.verify.collectives import Contract, Operation, prove, prove_so_far, read, where_ranks_stand
from meshwright.verify.collectives.group import FORMS

HERE = "tests/verify/test_verify_collectives.py"
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def contract_of(function: Callable[[], Any], folder: Path, ranks: int = 2) -> Contract:
    run_ranks(function, ranks, record=folder, timeout_s=60)
    return prove(read(folder, ranks))


def only_violation(contract: Contract) -> str:
    assert len(contract.violations) == 1, contract.violations
    return contract.violations[0]


def one(value: float = 1.0) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.float64)


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


# ---- What is recorded ----


def every_kind() -> None:
    rank, tensors = dist.get_rank(), [one(), one()]
    dist.all_reduce(one(), dist.ReduceOp.MAX)
    dist.broadcast(one(), 1)
    dist.reduce(one(), 1)
    dist.all_gather(tensors, one())
    _all_gather(torch.empty(8, dtype=torch.float64), one())
    _reduce_scatter(torch.empty(2, dtype=torch.float64), one())
    dist.all_to_all_single(one(), one())
    dist.gather(one(), tensors if rank == 0 else None, 0)
    dist.scatter(one(), tensors if rank == 0 else None, 0)
    dist.barrier()
    dist.all_gather_object([None, None], "text")
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(one())
        dist.all_reduce(one())
    functional.all_gather_tensor(one(), 0, dist.group.WORLD).sum()
    functional.reduce_scatter_tensor(one(), "sum", 0, dist.group.WORLD).sum()
    x = one().requires_grad_()
    functional.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD).sum().backward()
    if rank == 0:
        dist.send(one(), 1, tag=7)
    else:
        dist.recv(one(), 0, tag=7)


def test_every_way_of_issuing_is_recorded_with_its_place(tmp_path: Path) -> None:
    contract = contract_of(every_kind, tmp_path)
    assert contract.ok, contract.violations
    records = read(tmp_path, 2)
    kinds = [operation.kind for operation in records[1].operations]
    assert kinds[:10] == [
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
        "all_to_all_single", "gather", "scatter", "barrier",
    ]  # fmt: skip
    assert "all_reduce_coalesced" in kinds and kinds[-1] == "recv"
    assert kinds.count("all_to_all_single") == 3  # forward, and backward on autograd's side
    plain = [operation.kind for operation in records[1].operations if not operation.objects]
    assert sum("all_gather_into_tensor" in kind for kind in plain) == 2
    assert sum("reduce_scatter_tensor" in kind for kind in plain) == 2
    assert [operation.objects for operation in records[1].operations].count(True) == 2
    first, last = records[1].operations[0], records[1].operations[-1]
    assert first.reduce == "MAX" and first.what.startswith(
        f"all_reduce MAX float64 [4] on group (0, 1) at {_here(first)}"
    )
    assert (last.peer, last.tag, last.outputs[0].shape) == (0, 7, (4,))
    assert contract.operations == 2 * len(kinds) and contract.groups == 1


def _here(operation: Operation) -> str:
    assert operation.site.endswith(tuple("0123456789")) and HERE in operation.site
    return operation.site


def test_all_methods_of_torchs_groups_that_move_something_are_known() -> None:
    others = {
        "BackendType", "abort", "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name",
        "merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size", "split_group", "unbox",
        "use_pg_for_symm_mem_rendezvous", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL",
        "get_backend", "get_reconfigure_handle", "new_window", "reconfigure", "register_abort_hook",
        "register_post_hook", "register_pre_hook", "supports_abort_hooks", "supports_completion_hooks",
        "supports_reconfigure", "supports_window", "unregister_abort_hook", "unregister_post_hook",
        "unregister_pre_hook",
    }  # fmt: skip
    moving = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")} - others
    assert moving <= set(FORMS)
    assert {"_allgather_base", "_reduce_scatter_base"} <= set(FORMS)


# ---- Violations planted in small functions ----


def other_order() -> None:
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for operation in operations if dist.get_rank() == 0 else reversed(operations):
        dist.all_reduce(one(), operation)


def test_collectives_in_another_order(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(other_order, tmp_path))
    assert sentence.startswith("rank 1 issues all_reduce MAX float64 [4] on group (0, 1) at ")
    assert " where rank 0 issues all_reduce SUM float64 [4] on group (0, 1) at " in sentence
    assert sentence.count(HERE) == 2


def one_too_few() -> None:
    works = [dist.all_reduce(one(), async_op=True) for _ in range(2 - dist.get_rank())]
    works[0].wait()


def test_a_collective_that_one_rank_leaves_out(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(one_too_few, tmp_path))
    assert sentence.startswith("rank 1 issues no collective number 2 on group (0, 1) where rank 0 issues all_reduce")


def other_dtype() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float32 if dist.get_rank() == 0 else torch.int32))


def test_collectives_of_different_number_formats(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(other_dtype, tmp_path))
    assert (
        "rank 1 issues all_reduce SUM int32 [4]" in sentence
        and "where rank 0 issues all_reduce SUM float32" in sentence
    )


def unmatched_send() -> None:
    if dist.get_rank() == 0:
        dist.isend(one(), 1)
    dist.barrier()


def test_a_send_that_nobody_receives(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(unmatched_send, tmp_path))
    assert sentence.startswith("rank 0 issues send float64 [4] to rank 1 on group (0, 1) at ") and HERE in sentence
    assert sentence.endswith(" and rank 1 never receives it")


def other_message() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, 3), 1)
    else:
        dist.recv(torch.ones(2, 3, dtype=torch.int32), 0)


def test_a_message_received_as_something_else(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(other_message, tmp_path))
    assert sentence.startswith("rank 0 issues send float32 [2, 3] to rank 1 on group (0, 1) at ")
    assert " where rank 1 issues recv int32 [2, 3] from rank 0 on group (0, 1) at " in sentence


def tags_crossed() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(one(), 1, tag=tag) for tag in (1, 2)]
    else:
        works = [dist.irecv(one(), 0, tag=tag) for tag in (2, 1)]
    for work in works:
        work.wait()


def test_messages_that_only_their_tags_tell_apart(tmp_path: Path) -> None:
    assert "tags 1 and 2, but NCCL knows no tags" in only_violation(contract_of(tags_crossed, tmp_path))


def all_send_first() -> None:
    following, previous = neighbours()
    sending = dist.isend(one(), following)
    dist.recv(one(), previous)
    sending.wait()


def test_a_ring_in_which_every_rank_sends_first(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(all_send_first, tmp_path, 3))
    assert sentence.startswith("deadlock: rank 0 begins with send float64 [4] to rank 1 on group (0, 1, 2) at ")
    assert all(f"rank {rank} begins with send" in sentence for rank in range(3)) and sentence.count(HERE) == 3


def two_send_first() -> None:
    sending = dist.isend(one(), 1 - dist.get_rank())
    dist.recv(one(), 1 - dist.get_rank())
    sending.wait()


def test_two_ranks_that_send_first_on_one_communicator(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(two_send_first, tmp_path))
    assert sentence.startswith("deadlock: rank 0 waits at recv float64 [4] from rank 1 on group (0, 1) at ")
    assert ", which waits behind its send float64 [4] to rank 1" in sentence and "; rank 1 waits at recv" in sentence


def batched_ring() -> None:
    following, previous = neighbours()
    for _ in range(2):
        pair = [dist.P2POp(dist.isend, one(), following), dist.P2POp(dist.irecv, one(), previous)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def test_the_same_ring_in_batches_is_in_order(tmp_path: Path) -> None:
    assert contract_of(batched_ring, tmp_path, 3).ok
    assert [operation.batch for operation in read(tmp_path, 3)[0].operations] == [0, 0, 1, 1]


def batch_meets_single() -> None:
    if dist.get_rank() == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, one(), 1)])[0].wait()
    else:
        dist.recv(one(), 0)


def test_a_message_in_a_batch_on_one_side_only(tmp_path: Path) -> None:
    assert "one in a batch and one alone" in only_violation(contract_of(batch_meets_single, tmp_path))


def first_batch_without_all() -> None:
    rank = dist.get_rank()
    if rank < 2:
        pair = [dist.P2POp(dist.isend, one(), 1 - rank), dist.P2POp(dist.irecv, one(), 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    if rank == 1:
        dist.send(one(), 2)
    elif rank == 2:
        dist.recv(one(), 1)
    dist.barrier()


def test_a_group_whose_first_batch_leaves_a_rank_out(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(first_batch_without_all, tmp_path, 3))
    assert "for which NCCL connects ranks (0, 1, 2), but rank 2 never joins" in sentence


def groups_crossed() -> None:
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:  # both are connected by now
        dist.all_reduce(one(), group=group)
    works = [dist.all_reduce(one(), group=g, async_op=True) for g in groups[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()


def test_two_groups_used_in_another_order_under_way_together(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(groups_crossed, tmp_path))
    assert sentence.startswith("deadlock: rank 0 waits at all_reduce") and "; rank 1 waits at all_reduce" in sentence


def other_groups() -> None:
    for rank in (0, 1) if dist.get_rank() == 0 else (1, 0):
        dist.new_group([rank])


def test_groups_made_in_another_order(tmp_path: Path) -> None:
    sentence = only_violation(contract_of(other_groups, tmp_path))
    assert sentence.startswith("rank 1 creates group (1) at ") and "where rank 0 creates group (0) at " in sentence
    assert sentence.endswith("every rank must create all groups in the same order") and HERE in sentence


# ---- What NCCL refuses ----


def send_to_oneself() -> None:
    if dist.get_rank() == 0:
        dist.isend(one(), 0)


def uneven() -> None:
    _reduce_scatter(torch.empty(3, dtype=torch.float64), torch.empty(5, dtype=torch.float64))


def transposed() -> None:
    dist.all_reduce(torch.ones(2, 3).t())


def short_integers() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int16))


def bitwise() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.BAND)


def average_of_integers() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG)


def from_anyone() -> None:
    dist.send(one(), 1) if dist.get_rank() == 0 else dist.recv(one())


@pytest.mark.parametrize(
    ("function", "operation", "reason"),
    [
        (send_to_oneself, "send float64 [4] to rank 0", "a rank cannot send to itself"),
        (uneven, "reduce_scatter_tensor SUM float64 [5]", "uneven: the input must be 2 times the output"),
        (transposed, "all_reduce SUM float32 [3, 2]", "NCCL takes contiguous tensors only"),
        (short_integers, "all_reduce SUM int16 [4]", "NCCL has no int16"),
        (bitwise, "all_reduce BAND int64 [4]", "NCCL has no BAND"),
        (average_of_integers, "all_reduce AVG int64 [4]", "NCCL rounds an average of integers down"),
        (from_anyone, "recv_anysource float64 [4] from any rank", "NCCL has no recv_anysource"),
    ],
)
def test_what_nccl_refuses(function: Callable[[], None], operation: str, reason: str, tmp_path: Path) -> None:
    with contextlib.suppress(RankError):  # gloo refuses some of them too; the record is there all the same
        run_ranks(function, 2, record=tmp_path, timeout_s=60)
    found = [sentence for sentence in prove_so_far(read(tmp_path, 2)) if reason in sentence]
    assert found and f"issues {operation} on group (0, 1) at " in found[0] and HERE in found[0], found


# ---- Who waits where when ranks hang ----


def send_and_wait() -> None:
    following, previous = neighbours()
    dist.send(one(), following)
    dist.recv(one(), previous)


def standing_once(
    reached: Callable[[list[str]], bool], function: Callable[[], None], ranks: int, folder: Path
) -> list[str]:
    """Where ranks stand once they do what is expected, or at the end of a long time."""
    group = RankGroup(function, ranks, record=folder, timeout_s=LIMIT_S)
    try:
        wait_until(lambda: reached(where_ranks_stand(read(folder, ranks))), "the ranks do not come to their hang")
        assert not group.poll(0.0)
    finally:
        group.close()
    return where_ranks_stand(read(folder, ranks))


def test_a_hang_names_what_every_rank_waits_for(tmp_path: Path) -> None:
    standing = standing_once(lambda ranks: all("waits" in rank for rank in ranks), send_and_wait, 3, tmp_path)
    for rank, sentence in enumerate(standing):
        following = (rank + 1) % 3
        assert sentence.startswith(f"rank {rank} waits at send float64 [4] to rank {following} on group (0, 1, 2) at ")
        assert HERE in sentence and sentence.endswith(f", for rank {following}")


def stay_away() -> None:
    dist.all_reduce(one())
    while dist.get_rank() == 1:
        time.sleep(1)
    dist.all_reduce(one())


def test_a_rank_that_hangs_outside_collectives_waits_for_nothing(tmp_path: Path) -> None:
    waiting, absent = standing_once(
        lambda ranks: ranks[0].endswith(", for rank 1") and "all ranks have reached" in ranks[1], stay_away, 2, tmp_path
    )
    assert waiting.startswith("rank 0 waits at all_reduce SUM float64 [4]") and waiting.endswith(", for rank 1")
    assert absent.startswith("rank 1 is not waiting") and "which all ranks have reached" in absent


# ---- Violations planted in the real thing ----


def test_one_rank_that_sums_one_number_more(monkeypatch: pytest.MonkeyPatch) -> None:
    start_sum = World.start_sum

    def one_more(self: World, values: Any) -> Callable[[], list[float]]:
        faulthandler.disable()  # gloo aborts the rank that gets more than it expects
        return start_sum(self, [*values, 0.0] if self.rank == 1 else values)

    job = llama_job(dp_replicate=2, steps=1)
    reference(job, "float64")
    monkeypatch.setattr(World, "start_sum", one_more)
    with pytest.raises(RankError) as caught:
        check(job, collectives=True)
    place = r"on group \(0, 1\) at meshwright/parallel/world\.py:\d+"
    issued = [rf"issues all_reduce SUM float64 \[{size}\] {place}" for size in (7, 8)]
    assert re.search(rf"collectives: rank 1 {issued[1]} where rank 0 {issued[0]}", str(caught.value)), caught.value


def test_a_ring_that_one_rank_leaves_early_says_who_waits_where(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Order.sources

    def only_its_own(self: Order) -> list[int]:
        return list(sources(self))[: 1 if self.rank == 1 else None]

    job = llama_job(cp=2, steps=1)
    reference(job, "float64")
    monkeypatch.setattr(Order, "sources", only_its_own)
    monkeypatch.setattr(import_module("meshwright.verify.check"), "TIMEOUT_S", 10.0)
    with pytest.raises(RankError) as caught:
        check(job, collectives=True)
    message = str(caught.value)
    place = r"on group \(0, 1\) at meshwright/parallel/context/rings\.py:\d+"
    assert re.search(rf"\nrank 0 waits at (send|recv) float64 .* rank 1 {place}, for rank 1", message), message
    assert re.search(r"\nrank 1 waits ", message), message


@pytest.mark.thorough
def test_a_layout_in_order_passes_and_one_out_of_order_fails_though_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    job = llama_job(dp_shard=2, steps=1)
    verdict = check(job, collectives=True)
    assert verdict.ok and verdict.collectives is not None and verdict.collectives.operations > 20

    start_sum = World.start_sum

    def announced(self: World, values: Any) -> Callable[[], list[float]]:
        dist.all_reduce(one(), dist.ReduceOp.SUM if self.rank == 0 else dist.ReduceOp.MAX)
        return start_sum(self, values)

    monkeypatch.setattr(World, "start_sum", announced)
    verdict = check(job, collectives=True)
    assert verdict.equal and verdict.ok is False and verdict.first_wrong is None
    assert verdict.collectives is not None
    assert verdict.collectives.violations[0].startswith("rank 1 issues all_reduce MAX float64 [4] on group (0, 1) at ")


@pytest.mark.thorough
def test_the_command_says_so(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("verify", "demo", "--set", "layout.dp_replicate=2", "--steps", "1", "--collectives")
    good = cli(*job)
    assert good.code == 0 and re.search(r"collectives: \d+ of 2 ranks, \d+ groups, same order, no deadlock", good.out)
    if torch.cuda.device_count() == 0:
        assert "NCCL: not run, because this machine has no CUDA device" in good.out
    start_sum = World.start_sum

    def announced(self: World, values: Any) -> Callable[[], list[float]]:
        dist.all_reduce(one(), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[self.rank])
        return start_sum(self, values)

    monkeypatch.setattr(World, "start_sum", announced)
    bad = cli(*job, "--json")
    answer = json.loads(bad.out)
    assert bad.code == 1 and answer["equal"] is True
    assert set(answer["collectives"]) == {"ok", "ranks", "operations", "groups", "violations"}
    assert answer["collectives"]["ok"] is False and "rank 1 issues" in answer["collectives"]["violations"][0]
    bad = cli(*job)
    assert bad.code == 1 and "collectives: rank 1 issues all_reduce MAX" in bad.out
