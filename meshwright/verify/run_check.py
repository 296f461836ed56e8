"""The run itself against one process: `train` with its data, evaluations and checkpoints, resumed in other layouts."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import checkpoints
from meshwright.job import Job, LoadedJob, job_text
from meshwright.job.devices import Layout
from meshwright.layout import ranks_of, require_layout
from meshwright.verify.check import COMPILED_TIMEOUT_S, Verdict, leaks, prepare_compiler, reference
from meshwright.verify.compare import zero_gradients
from meshwright.verify.ranks import run_ranks
from meshwright.verify.run_compare import Record, compare_records, read_record, run_bounds
from meshwright.verify.run_plan import alone, legs_of
from meshwright.verify.run_text import write_text

Train = Callable[[LoadedJob, bool, torch.dtype | None], Any]
"""Trains a job as the rank that this process is, from the start or from the newest checkpoint, in a format."""

TIMEOUT_S = 300.0


def check_run(
    job: Job, train: Train, dtype: str = "float32", prepared: bool = False, record: Path | None = None
) -> Verdict:
    """Run a job that `as_run` made, once in one process and through its legs, and compare what they wrote and saved.

    Its text is generated, and `prepared` where the job says so. With `record` the ranks of each leg record their
    collectives in a folder there, named by the leg's number.
    """
    require_layout(job, ranks_of(job.layout))
    prepare_compiler(job, "cpu")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-run-") as made:
        folder = Path(made)
        [job] = run_ranks(write_text, 1, job, folder, prepared, timeout_s=TIMEOUT_S)
        proof = _Proof(folder, train, torch.float64 if dtype == "float64" else None)
        expected = proof.run(alone(job), "alone", 0, 0)
        bounds, zeros = run_bounds(job, dtype), _zero_gradients(job)
        rows = []
        for attempt, leg in enumerate(legs_of(job)):
            folder_of_leg = None if record is None else record / str(attempt)
            seen = proof.run(leg.job, "run", attempt, leg.start, folder_of_leg)
            rows += compare_records(leg, seen, expected, bounds, zeros)
    return Verdict(job, dtype, rows + leaks(job), time.monotonic() - started)


class _Proof:
    """Runs in one folder, and what they left."""

    def __init__(self, folder: Path, train: Train, dtype: torch.dtype | None) -> None:
        self._folder, self._train, self._dtype = folder, train, dtype

    def run(self, job: Job, name: str, attempt: int, start: int, record: Path | None = None) -> Record:
        """Train a job on forked ranks, from the start or from the checkpoint of a step."""
        if record is not None:
            record.mkdir()
        run = self._folder / name
        settings = job.run.model_copy(update={"folder": str(run)})
        job = job.model_copy(update={"run": settings})
        if start:
            _forget(run, start)
        loaded = LoadedJob(job, name, job_text(job, "a proof of the run itself"), {})
        timeout_s = COMPILED_TIMEOUT_S if job.run.compiles else TIMEOUT_S
        ranks = ranks_of(job.layout)
        run_ranks(self._train, ranks, loaded, start > 0, self._dtype, timeout_s=timeout_s, record=record)
        return read_record(run, attempt, job.run.steps)


def _zero_gradients(job: Job) -> set[str]:
    """Parameters whose gradient is mathematically zero, from one step on tokens in memory."""
    data: dict[str, Any] = {
        "sources": ("builtin:synthetic",),
        "weights": None,
        "stages": (),
        "stream": False,
        "join": None,
        "workers": 0,
        "fields": {},
        "items_per_sequence": None,
    }
    once = job.model_copy(
        update={
            "data": job.data.model_copy(update=data),
            "evaluation": job.evaluation.model_copy(update={"every_steps": 0}),
            "run": job.run.model_copy(update={"steps": 1}),
            "layout": Layout(),
        }
    )
    return zero_gradients(reference(once, "float64"))


def _forget(run: Path, start: int) -> None:
    """Remove what was saved after a step, as if the run had died before it could save again."""
    for checkpoint in list(checkpoints(run)):
        if int(checkpoint.path.name.rpartition("-")[2]) > start:
            shutil.rmtree(checkpoint.path)
