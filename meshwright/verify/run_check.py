"""The run itself beside one process: `train` with its data, evaluations and checkpoints, resumed in other layouts."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import checkpoints
from meshwright.job import Job, LoadedJob, job_text
from meshwright.layout import ranks_of, require_layout
from meshwright.verify.check import Verdict
from meshwright.verify.compare import Kind
from meshwright.verify.ranks import run_ranks
from meshwright.verify.run_compare import Record, compare_records, read_record
from meshwright.verify.run_plan import alone, legs_of
from meshwright.verify.run_text import write_text

Train = Callable[[LoadedJob, bool, torch.dtype | None], Any]
"""Trains a job as the rank that this process is, from the start or from the newest checkpoint, in a format."""

TIMEOUT_S = 300.0
RUN_BOUNDS: dict[str, dict[Kind, float]] = {
    "float64": {"loss": 1e-9, "norm": 1e-9, "evaluation": 1e-9, "weight": 1e-9, "state": 1e-9},
    "float32": {"loss": 1e-5, "norm": 1e-5, "evaluation": 1e-5, "weight": 1e-4, "state": 1e-3},
}


def check_run(job: Job, train: Train, dtype: str = "float32") -> Verdict:
    """Run a job that `as_run` made: once in one process, and through its legs; compare what they wrote and saved."""
    require_layout(job, ranks_of(job.layout))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-run-") as made:
        folder = Path(made)
        [data] = run_ranks(write_text, 1, job, folder, timeout_s=TIMEOUT_S)
        job = job.model_copy(update={"data": data})
        proof = _Proof(folder, train, torch.float64 if dtype == "float64" else None)
        reference = proof.run(alone(job), "alone", 0, 0)
        rows = []
        for attempt, leg in enumerate(legs_of(job)):
            seen = proof.run(leg.job, "run", attempt, leg.start)
            rows += compare_records(leg, seen, reference, RUN_BOUNDS[dtype])
    return Verdict(job, dtype, rows, time.monotonic() - started)


class _Proof:
    """Runs in one folder, and what they left."""

    def __init__(self, folder: Path, train: Train, dtype: torch.dtype | None) -> None:
        self._folder, self._train, self._dtype = folder, train, dtype

    def run(self, job: Job, name: str, attempt: int, start: int) -> Record:
        """Train a job on forked ranks, anew or from the checkpoint of a step."""
        run = self._folder / name
        settings = job.run.model_copy(update={"folder": str(run)})
        job = job.model_copy(update={"run": settings})
        if start:
            _forget(run, start)
        loaded = LoadedJob(job, name, job_text(job, "a proof of the run itself"), {})
        run_ranks(self._train, ranks_of(job.layout), loaded, start > 0, self._dtype, timeout_s=TIMEOUT_S)
        return read_record(run, attempt, job.run.steps)


def _forget(run: Path, start: int) -> None:
    """Take away what was saved after a step: what is left of a run that died before it could save again."""
    for checkpoint in list(checkpoints(run)):
        if int(checkpoint.path.name.rpartition("-")[2]) > start:
            shutil.rmtree(checkpoint.path)
