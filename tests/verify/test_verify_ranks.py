"""Forked ranks: results by rank, the first error and not its echo, silent deaths, time limits."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from waiting import LIMIT_S, wait_for_file, wait_until

from meshwright.errors import UserError
from meshwright.verify import RankError, RankGroup, run_ranks


def rank_and_sum(start: int) -> dict[str, Any]:
    total = torch.tensor([float(start + dist.get_rank())], dtype=torch.float64)
    dist.all_reduce(total)
    return {"rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"]), "total": total}


def test_results_come_back_by_rank_tensors_included() -> None:
    results = run_ranks(rank_and_sum, 3, 10)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["size"] == 3 for result in results)
    assert all(torch.equal(result["total"], torch.tensor([33.0], dtype=torch.float64)) for result in results)


def test_one_rank_is_a_world_too() -> None:
    assert run_ranks(rank_and_sum, 1, 5)[0]["total"].item() == 5.0


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_the_failed_rank_is_named_and_not_the_peers_that_waited_for_it() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed[\s\S]*ValueError: the cause"):
        run_ranks(fail_on_one, 3)


def refuse() -> None:
    raise UserError("layout.tp = 9 is too many; use 3")


def test_a_users_mistake_on_a_rank_stays_one() -> None:
    with pytest.raises(UserError, match=r"^layout\.tp = 9 is too many; use 3$"):
        run_ranks(refuse, 2)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_without_a_word_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match=r"rank 1 died without reporting an error \(signal SIGKILL\)"):
        run_ranks(die_on_one, 3)


def die_on_one_after_the_error_of_two(told: Path) -> None:
    if dist.get_rank() == 2:
        raise ConnectionResetError("as of a peer whose death is not yet known")
    if dist.get_rank() == 1:
        wait_for_file(told)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_death_that_is_seen_by_its_peers_first_is_named_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, take_late_reports = tmp_path / "told", RankGroup._take_late_reports

    def take_late_reports_from_now(group: RankGroup) -> None:
        told.touch()
        take_late_reports(group)

    monkeypatch.setattr(RankGroup, "_take_late_reports", take_late_reports_from_now)
    monkeypatch.setattr("meshwright.verify.ranks.LATE_S", LIMIT_S)
    with pytest.raises(RankError, match=r"rank 1 died without reporting an error \(signal SIGKILL\)"):
        run_ranks(die_on_one_after_the_error_of_two, 3, told)


def crash_in_a_library() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def test_a_rank_that_a_library_crashes_says_where() -> None:
    faulthandler.enable(sys.__stderr__)
    ctypes.CDLL(None).signal(int(signal.SIGSEGV), 0)  # as a library may leave it behind faulthandler's back
    with pytest.raises(RankError, match=r"(?s)rank 1 died .*\(signal SIGSEGV\).*in string_at.*in crash_in_a_library"):
        run_ranks(crash_in_a_library, 2)


def hang_on_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def test_a_hanging_rank_is_named_and_everything_is_ended() -> None:
    group = RankGroup(hang_on_zero, 2, timeout_s=LIMIT_S)
    pids = [process.pid for process in group._processes]
    wait_until(lambda: group.poll(0.1) or 1 in group._reports, "rank 1 has not answered")
    group._deadline = 0.0
    with pytest.raises(RankError, match=r"rank 0 did not answer within"):
        group.poll(0.1)
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def count_threads() -> int:
    return torch.get_num_threads()


def test_ranks_compute_on_one_thread_each() -> None:
    assert run_ranks(count_threads, 2) == [1, 1]


def test_nothing_is_forked_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be forked"):
        run_ranks(count_threads, 2)


def _threads_of_gloo() -> list[int]:
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def test_groups_of_gloo_complete_in_one_thread() -> None:
    """Two would corrupt the memory that holds the name of what completed last."""
    assert run_ranks(_threads_of_gloo, 2) == [[1, 1], [1, 1]]
