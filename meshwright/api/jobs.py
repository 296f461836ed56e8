"""Jobs, however a caller names them."""

from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob, Overrides, changed_job, job_text, preset_named, recipes
from meshwright.job import load_job as load_file

JobLike = Job | LoadedJob | str | Path
"""A job, or what `load_job` takes."""


def load_job(source: JobLike, set: Overrides = (), *, trust: bool = False) -> Job:
    """The job of a file, a recipe's name, a run folder, a model preset's name, or another job; checked, and frozen.

    `set` changes fields, as `{"run.steps": 10}` or `["run.steps=10"]`. A run folder that names code of its own is
    refused unless that code is trusted.
    """
    return loaded(source, set, trust=trust).job


def loaded(source: JobLike, set: Overrides = (), *, trust: bool = False) -> LoadedJob:
    """As `load_job`, with the job's name and text."""
    if isinstance(source, LoadedJob) and not set:
        return source
    if isinstance(source, str | Path):
        name = str(source)
        if not _is_preset(name):
            return load_file(name, set, trust=trust)
        job = _of_preset(name, set)
    elif isinstance(source, Job | LoadedJob):
        job, name = (source, "job") if isinstance(source, Job) else (source.job, source.name)
        job = changed_job(job, set) if set else job
    else:
        raise UserError(
            f"{source!r} is of type {type(source).__name__}, not a job; give a job, a job file, a recipe, a run folder "
            "or a preset"
        )
    return LoadedJob(job, name, job_text(job, "made in Python"), {})


def _of_preset(name: str, set: Overrides) -> Job:
    """A job of defaults with a preset's shape."""
    if isinstance(set, Mapping):
        return changed_job(Job(), {"model.preset": name} | dict(set))
    return changed_job(Job(), [f"model.preset={name}", *set])


def _is_preset(name: str) -> bool:
    return preset_named(name) is not None and name not in recipes() and not Path(name).exists()
