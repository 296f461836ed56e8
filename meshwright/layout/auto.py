"""What `auto` stands for: precision.compute and run.compile on a device, and why.

Everything that plans, verifies or runs a job resolves it here first; a run folder holds the values and not `auto`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import completed, gpu_by_key, profile_of
from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout.rules import ranks_of, require_layout

AUTO = "auto"


@dataclass(frozen=True)
class Device:
    """What the choices depend on."""

    name: str
    has_bf16: bool
    why_not_compiled: str | None = None
    """Why blocks are not compiled for it; None if they are."""


THE_CPU = Device("a CPU", has_bf16=False, why_not_compiled="a CPU")


@dataclass(frozen=True)
class Choice:
    """The value that `auto` stands for in a job, and why."""

    value: str | bool
    why: str


def auto_choices(job: Job, device: Device) -> dict[str, Choice]:
    """The choice for every `section.field` of a job that is `auto`."""
    choices = {}
    if job.precision.compute == AUTO:
        has = "has" if device.has_bf16 else "has no"
        why = device.name if device is THE_CPU else f"{device.name} {has} bf16"
        choices["precision.compute"] = Choice("bf16" if device.has_bf16 else "fp32", why)
    if job.run.compile == AUTO and job.layout.async_tp:
        choices["run.compile"] = Choice(True, "layout.async_tp = true needs it")
    elif job.run.compile == AUTO:
        why_not = device.why_not_compiled or _why_not_compiled(job)
        choices["run.compile"] = Choice(why_not is None, why_not or f"{device.name} is a GPU")
    return choices


def resolve_auto(job: Job, device: Device) -> Job:
    """The job with a value in every field that is `auto`."""
    return with_values(job, {name: choice.value for name, choice in auto_choices(job, device).items()})


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these values by `section.field`, which are known to be valid."""
    for name, value in values.items():
        section, field = name.split(".")
        job = job.model_copy(update={section: getattr(job, section).model_copy(update={field: value})})
    return job


def cluster_device(cluster: Cluster) -> Device | None:
    """The device of a [cluster], by the table of GPUs or its profile; None where no known one is named."""
    try:
        key = completed(cluster).gpu
    except UserError:  # for whoever uses the cluster
        return None
    if key is None or key == CPU:
        return None if key is None else THE_CPU
    try:
        gpu = gpu_by_key(key)
    except UserError:
        profile = profile_of(key)
        if profile is None:
            return None
        gpu = profile.as_gpu()
    return Device(gpu.key, has_bf16="bf16" in gpu.peak)


def resolve_for(job: Job, cluster: Cluster) -> Job:
    """The job as it runs on the devices of a [cluster], or on a CPU where no known device is named."""
    return resolve_auto(job, cluster_device(cluster) or THE_CPU)


def device_of_check(cluster: Cluster, here: Device) -> Device:
    """The device that a check on this one stands for: its formats are the cluster's, and it compiles what can be
    compiled here."""
    there = cluster_device(cluster) or here
    return replace(there, why_not_compiled=there.why_not_compiled or here.why_not_compiled)


def _why_not_compiled(job: Job) -> str | None:
    """The refusal of a layout that runs eagerly but not compiled."""
    for compiled in (False, True):
        try:
            require_layout(with_values(job, {"run.compile": compiled}), ranks_of(job.layout))
        except UserError as error:
            return str(error).partition(";")[0] if compiled else None
    return None
