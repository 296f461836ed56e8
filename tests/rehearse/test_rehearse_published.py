"""Published runs on one GPU: which are rehearsed, how a short step stands for a long one, and what is compared."""

import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rehearsed_jobs import as_planned

from meshwright.plan import predict
from meshwright.rehearse import Rehearsal

SCRIPT = Path(__file__).parents[2] / "benchmarks/rehearse_published.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark's functions."""
    return Namespace(**runpy.run_path(str(SCRIPT)))


def as_if_measured(run: Any, slower: float = 1.0) -> Rehearsal:
    """Ranks of the short step that take on an H200 what is planned, or longer."""
    here = run.case.cluster.model_copy(update={"gpu": "h200"})
    ranks = tuple(as_planned(run.short, here, slower))
    return Rehearsal(len(ranks), "", "NVIDIA H200", "2.11.0", ranks, None, (), ())


@pytest.mark.parametrize(("row", "micro_batches", "repeated"), [("titan-005", 1, 1.0), ("nanotron-015", 4, 2.0)])
def test_ranks_as_planned_make_the_planned_step_of_the_published_run(
    script: Any, row: str, micro_batches: int, repeated: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.plan.machine.find_profile", lambda *given: None)  # else of one GPU alone
    [run] = script.runs(row).values()
    assert run.job.run.compiles == (row == "titan-005") and run.job.batch.micro_batch == run.case.job.batch.micro_batch
    assert (run.short.accumulation, run.repeated) == (micro_batches, repeated)
    found = script.compared(run, as_if_measured(run))
    assert found["published_s"] == run.case.step_s
    assert found["planned_s"] == predict(run.case.job, run.case.cluster, run.case.software).step_s
    assert found["rehearsed_s"] == pytest.approx(predict(run.job, run.case.cluster).step_s, rel=0.02)
    assert found["rehearsed_as_theirs_s"] == pytest.approx(found["planned_s"], rel=0.02)
    assert found["rehearsed_error"] == pytest.approx(found["planned_error"], abs=0.03)
    slower = script.compared(run, as_if_measured(run, 1.2))
    assert slower["rehearsed_measured_s"] == pytest.approx(1.2 * found["rehearsed_measured_s"], rel=0.01)
    assert slower["rehearsed_error"] > found["rehearsed_error"] + 0.1
    assert f"{slower['rehearsed_error']:+.1%}" in script.shown({"id": row, "run": "", "wall_s": 0, **slower})
