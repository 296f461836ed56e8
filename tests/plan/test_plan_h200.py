"""Predictions next to runs that were recorded on one H200, and those committed for runs to come."""

import json
import statistics
import tomllib
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from meshwright.job import load_job
from meshwright.job.devices import Cluster
from meshwright.plan import Prediction, predict
from meshwright.plan.predict import own_software

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EVIDENCE = BENCHMARKS / "evidence"


def predicted(overrides: list[str], *, as_recorded: bool = False) -> Prediction:
    """Of our trainer, or as it was when runs were recorded: its compiled blocks kept more."""
    job = load_job("pretrain-1b", overrides).job
    own = own_software(job)
    return predict(job, Cluster(gpu="h200"), replace(own, lean_blocks=False) if as_recorded else own)


def recorded() -> list[dict[str, Any]]:
    lines = (BENCHMARKS / "results" / "plan_h200_measured.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["state"] == "measured"]


def recorded_jobs() -> dict[str, list[str]]:
    spec = spec_from_file_location("plan_h200", BENCHMARKS / "plan_h200.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: job.overrides for name, job in module.jobs_of(None).items()}


def test_recorded_runs_are_near_their_predictions() -> None:
    """Peak memory almost to the byte, but for a run that kept expanded key heads; time within a few per cent."""
    jobs, memory, time = recorded_jobs(), [], []
    for row in recorded():
        prediction = predicted(jobs[row["name"]], as_recorded=True)
        memory.append(abs(prediction.fullest.allocated / row["peak_bytes"] - 1))
        time.append(abs(prediction.step_s / row["step_s"] - 1))
    assert len(memory) == 24
    assert statistics.median(memory) < 0.0005 and statistics.mean(memory) < 0.002 and max(memory) < 0.014
    assert statistics.median(time) < 0.03 and statistics.mean(time) < 0.045


def test_the_new_jobs_are_those_that_were_predicted() -> None:
    """The committed predictions are of the jobs in the file; all fit, and nothing they ask for is left out."""
    jobs = tomllib.loads((EVIDENCE / "plan_h200_new.toml").read_text())
    rows = json.loads((EVIDENCE / "plan_h200_new_predicted.json").read_text())["rows"]
    assert list(rows) == list(jobs) and len(jobs) == 12
    assert not {json.dumps(one["set"]) for one in jobs.values()} & {json.dumps(one) for one in recorded_jobs().values()}
    for name, one in jobs.items():
        prediction = predicted(one["set"])
        assert prediction.fits and not prediction.not_modelled and rows[name]["step_s"] > 0, name
