"""Small jobs of the matrix in any layout, for the tests of verify."""

from functools import cache
from typing import Any

from meshwright.job import Job
from meshwright.verify import Line, load_matrix


@cache
def matrix_lines() -> list[Line]:
    """All lines of the matrix: reading them takes as long as a check of one."""
    return load_matrix()


@cache
def matrix_jobs() -> dict[str, Job]:
    """The job of every line, by its name."""
    return {line.name: line.job for line in matrix_lines()}


def llama_job(*, steps: int = 2, batch: dict[str, Any] | None = None, **layout: Any) -> Job:
    """The matrix's llama (odd layers, odd vocabulary, heads 3:1) in a layout."""
    base = matrix_jobs()["llama · tp 2"].model_dump()
    base["layout"], base["run"]["steps"] = layout, steps
    base["batch"] |= {"micro_batch": 1} | (batch or {})
    base["evaluation"]["every_steps"] = 0
    return Job.model_validate(base)
