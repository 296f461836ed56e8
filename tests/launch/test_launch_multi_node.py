"""What a machine's agent records of its ranks' failure."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from meshwright.job import load_job
from meshwright.launch import multi_node
from meshwright.launch.nodes import Node
from meshwright.launch.rank_failure import RankFailure
from meshwright.runs import RunFolder


@pytest.mark.parametrize("late", [False, True])
def test_a_machine_that_wakes_late_does_not_end_the_attempt_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It was given up, and a later attempt has begun since: its own failure is no event of that one."""
    run = tmp_path / "run"

    def agent(*_: object) -> None:
        for attempt in range(2 if late else 1):
            RunFolder.open(run).event("start", attempt=attempt)
        raise ChildFailedError("python", {0: ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file="none")})

    monkeypatch.setattr(multi_node, "run_agent", agent)
    monkeypatch.setattr(multi_node, "ended_by", lambda error, logs: RankFailure("rank 0 was killed", 0, ""))
    loaded = load_job("demo", [f"run.folder={run}", "run.device=cpu"])
    with pytest.raises(RankFailure):
        multi_node.launch_node(loaded, 1, Node(0, 1, "127.0.0.1:1"), [])
    assert RunFolder.open(run).state() == ("running" if late else "failed")
