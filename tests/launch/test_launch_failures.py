"""Of all the failures that one failure causes, the user sees the first."""

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.data import WorkerDied
from meshwright.errors import UserError
from meshwright.launch.failures import ERROR_FILE, explain, failures_written_down
from meshwright.launch.rank_failure import RankFailure

RESET = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4")


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`failed(2, ValueError("x"))`: what the agent knows of a rank that failed so, or with an exit code alone."""

    def make(rank: int, how: Exception | int) -> ProcessFailure:
        file = tmp_path / f"rank-{rank}.error.json"
        if isinstance(how, int):
            return ProcessFailure(rank, 1, how, str(file))
        monkeypatch.setenv(ERROR_FILE, str(file))
        with pytest.raises(type(how)), failures_written_down():
            raise how
        return ProcessFailure(rank, 1, 2 if isinstance(how, UserError) else 1, str(file))

    return make


def test_an_error_comes_before_its_echoes(failed, tmp_path: Path) -> None:
    failures = {0: failed(0, RESET), 2: failed(2, ValueError("no such\nthing")), 1: failed(1, -signal.SIGTERM)}
    cause = explain(failures, tmp_path)
    assert isinstance(cause, RankFailure) and cause.rank == 2
    assert str(cause).startswith("rank 2 failed at ") and "ValueError: no such;" in str(cause)
    assert str(cause).endswith(f"its log is {tmp_path / 'rank-2.err'}") and "\n" not in str(cause)
    assert cause.rank_traceback.startswith("Traceback") and "no such\nthing" in cause.rank_traceback
    assert (tmp_path / "rank-2.err").read_text() == cause.rank_traceback


def test_the_earlier_of_two_errors_of_their_own_comes_first(failed, tmp_path: Path) -> None:
    later = {1: failed(1, ValueError("first")), 0: failed(0, KeyError("second"))}
    assert explain({0: later[0], 1: later[1]}, tmp_path).rank == 1


def test_a_killed_rank_comes_before_the_complaints_of_its_peers(failed, tmp_path: Path) -> None:
    failures = {0: failed(0, RESET), 1: failed(1, -signal.SIGTERM), 3: failed(3, -signal.SIGKILL)}
    assert "rank 3 was killed by SIGKILL" in str(explain(failures, tmp_path))


def test_a_dead_data_worker_is_no_echo_whatever_its_words(failed, tmp_path: Path) -> None:
    failures = {0: failed(0, RESET), 1: failed(1, WorkerDied("a data worker failed (Connection reset by peer)"))}
    assert str(explain(failures, tmp_path)).startswith("rank 1 failed")


def test_a_rank_that_ended_well_too_early_is_named(failed, tmp_path: Path) -> None:
    failures = {0: failed(0, RESET), 2: failed(2, -signal.SIGTERM)}
    assert str(explain(failures, tmp_path, 3)).startswith("rank 1 exited with code 0 before the run was over")


def test_a_lost_connection_is_told_when_nothing_else_is_known(failed, tmp_path: Path) -> None:
    failures = {1: failed(1, RESET), 0: failed(0, -signal.SIGTERM)}
    assert "rank 1 failed" in str(explain(failures, tmp_path)) and "by peer" in str(explain(failures, tmp_path))


def test_a_rank_that_says_nothing_is_named_with_its_exit_code(failed, tmp_path: Path) -> None:
    assert "rank 1 exited with code 3" in str(explain({1: failed(1, 3)}, tmp_path))


def test_a_users_mistake_stays_one_sentence(failed, tmp_path: Path) -> None:
    failures = {0: failed(0, UserError("lower optimizer.lr")), 1: failed(1, RESET)}
    cause = explain(failures, tmp_path)
    assert isinstance(cause, UserError) and str(cause) == "lower optimizer.lr"


def test_a_killed_rank_has_the_newest_of_its_logs(failed, tmp_path: Path) -> None:
    for number, name in enumerate(("rank-1.err", "rank-1.restart-1.err", "rank-11.restart-2.err")):
        (tmp_path / name).write_text("Fatal Python error")
        os.utime(tmp_path / name, (number, number))
    sentence = str(explain({1: failed(1, -signal.SIGSEGV)}, tmp_path))
    assert sentence == f"rank 1 was killed by SIGSEGV; its log is {tmp_path / 'rank-1.restart-1.err'}"
