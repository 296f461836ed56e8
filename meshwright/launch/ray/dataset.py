"""A dataset of Ray Data as a run's data: its rows are written once to the run folder, in their order, with their hash.

From then on they are read as any other file, so that the order of samples and what a resume promises do not depend on
how Ray would compute the dataset the next time.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.atomic import atomic_file, write_atomic
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob, changed_job, job_text

ROWS = "data/rows.jsonl"
_HASH = "data/rows.sha256"


def with_rows(loaded: LoadedJob, dataset: Any, run: Path) -> LoadedJob:
    """A job whose data are the rows that `write_rows` writes; one that names data of its own is rejected."""
    import ray.data

    if not isinstance(dataset, ray.data.Dataset):
        raise UserError(
            f"dataset = {type(dataset).__name__} is not a dataset of Ray Data; give what ray.data.read_json "
            "or another of its functions returns"
        )
    given = loaded.job.data
    if "sources" in given.model_fields_set:
        raise UserError(f"data.sources = {list(given.sources)} and a dataset are both given; leave one of them out")
    job = changed_job(loaded.job, {"data.sources": [str(run / ROWS)]})
    return replace(loaded, job=job, merged=job_text(job, "the job that ran, on the rows of a dataset"))


def write_rows(dataset: Any, run: Path, job: Job) -> None:
    """Write a dataset's rows to a new run's folder; one that has other rows, or another order, when it is read again is
    rejected."""
    from ray.data.dataset import MaterializedDataset

    (run / ROWS).parent.mkdir()
    digest = hashlib.sha256()
    with atomic_file(run / ROWS, durable=True) as draft, draft.open("wb") as file:
        for line in _lines(dataset, job):
            digest.update(line)
            file.write(line)
    if not (run / ROWS).stat().st_size:
        raise UserError("dataset has no rows; give one that has some")
    # A materialized one is fixed: Ray keeps its blocks.
    if not isinstance(dataset, MaterializedDataset) and _hash(dataset, job) != digest.hexdigest():
        raise UserError(
            "dataset has other rows, or another order, each time it is read, so a run could not be repeated; give its "
            "random functions a seed, or give dataset.materialize()"
        )
    write_atomic(run / _HASH, f"{digest.hexdigest()}\n")


def require_same_rows(dataset: Any, run: Path, job: Job) -> None:
    """Reject another dataset than the one that a run began with."""
    try:
        before = (run / _HASH).read_text(encoding="utf-8").strip()
    except OSError:
        raise UserError(f"{run} was not started from a dataset; continue it without one") from None
    if _hash(dataset, job) != before:
        raise UserError(
            f"dataset does not have the rows, in their order, that {run} began with; give the same one or none, as the "
            "run folder keeps its rows"
        )


def _hash(dataset: Any, job: Job) -> str:
    digest = hashlib.sha256()
    for line in _lines(dataset, job):
        digest.update(line)
    return digest.hexdigest()


def _lines(dataset: Any, job: Job) -> Iterator[bytes]:
    """Every row as a line of JSON."""
    field = job.data.text_field
    with _in_order(dataset):
        for number, row in enumerate(dataset.iter_rows(), start=1):
            if job.data.format == "text" and not isinstance(row.get(field), str):
                raise UserError(
                    f"dataset: row {number} has no text in {field!r}, only {', '.join(map(repr, row)) or 'nothing'}; "
                    "set data.text_field to the name of its text"
                )
            try:
                yield json.dumps(row, default=_plain).encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"dataset: row {number} cannot be written as JSON ({error}); drop that column"
                ) from None


def _plain(value: Any) -> Any:
    """A value of numpy as one of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


@contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Ray returns blocks as they are ready unless asked to keep their order."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
