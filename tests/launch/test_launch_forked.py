"""CPU ranks forked from their launcher."""

import os
import runpy
import time
from pathlib import Path

import pytest

from meshwright.job import Job
from meshwright.launch.elastic import run_under_agent

RANKS = 3


def test_no_rank_begins_before_all_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank forked while another connects could inherit a held lock of the C library, and hang."""
    forked, fork = [], os.fork

    def slow_fork() -> int:
        time.sleep(0.5)  # long enough for the ranks before it to begin
        forked.append(time.time())
        return fork()

    def begin(*_: object, **__: object) -> None:
        (tmp_path / f"began-{os.environ['RANK']}").write_text(str(time.time()))

    monkeypatch.setattr(os, "fork", slow_fork)
    monkeypatch.setattr(runpy, "run_module", begin)  # inherited by the forks
    job = Job.model_validate({"run": {"device": "cpu"}})
    run_under_agent(job, tmp_path, RANKS, [])
    assert len(forked) == RANKS
    began = [float((tmp_path / f"began-{rank}").read_text()) for rank in range(RANKS)]
    assert min(began) > max(forked)
