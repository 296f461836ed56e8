"""What a job leaves open and the rest of it determines."""

from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import completed
from meshwright.job import Job
from meshwright.layout.rules import ranks_of, table_of
from meshwright.layout.stages import split_layers


def derived_values(job: Job) -> dict[str, Any]:
    """The value of every `section.field` that is not set but follows from others, as far as the layout can run."""
    found: dict[str, Any] = {"layout.zero": job.layout.zero_stage, "schedule.warmup_steps": job.warmup_steps}
    if job.schedule.name == "wsd":
        found["schedule.decay_steps"] = job.decay_steps
    if job.layout.pp > 1:
        found |= _of_pipeline(job)
    found |= _of_cluster(job)
    return {name: value for name, value in found.items() if not _is_given(job, name)}


def _of_pipeline(job: Job) -> dict[str, Any]:
    try:
        table = table_of(job)
    except UserError:  # for whoever runs it; here it is only shown
        return {}
    stages = job.layout.pp * table.virtual_stages
    if stages > job.model.layers:
        return {}
    split = [len(layers) for layers in split_layers(job, stages)]
    return {"layout.virtual_stages": table.virtual_stages, "layout.split": split}


def _of_cluster(job: Job) -> dict[str, Any]:
    try:
        machines = completed(job.cluster, ranks_of(job.layout))
    except UserError:
        return {}
    return {
        f"cluster.{name}": value
        for name, value in machines
        if value is not None and value != getattr(job.cluster, name)
    }


def _is_given(job: Job, name: str) -> bool:
    section, field = name.split(".")
    table = getattr(job, section)
    return getattr(table, field) is not None and field in table.model_fields_set
