"""A small job in any layout, for the tests of verify."""

from typing import Any

from meshwright.job import Job
from meshwright.verify import load_matrix


def llama_job(*, steps: int = 2, batch: dict[str, Any] | None = None, **layout: Any) -> Job:
    """The matrix's llama (odd layers, odd vocabulary, heads 3:1) in a layout."""
    base = next(line.job for line in load_matrix() if line.name == "llama · tp 2").model_dump()
    base["layout"], base["run"]["steps"] = layout, steps
    base["batch"] |= {"micro_batch": 1} | (batch or {})
    base["evaluation"]["every_steps"] = 0
    return Job.model_validate(base)
