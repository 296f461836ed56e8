"""How long the optimizer's update takes."""

from meshwright.cost import ADAMW_MOVED_BYTES, MASTER_BYTES, tensor_count
from meshwright.job import Job
from meshwright.layout import updates_in_one_pass
from meshwright.plan.kernels import Device, memory_s
from meshwright.plan.launches import bare_launch_s

_TENSOR_LAUNCHES = 2.6
"""Host time for a tensor's share of the norm and of the update, in multiples of a bare launch (26 µs with an H200)."""
_ONE_PASS = 0.9
"""Fraction of a copy's bandwidth for an update over five arrays at once."""
_TIMES_ADAMW = {
    ("adamw", "bf16"): 7.5, ("adamw", "int8"): 10.7,
    ("muon", "fp32"): 9.6, ("muon", "bf16"): 13.9, ("muon", "int8"): 14.2,
    ("lion", "fp32"): 1.8, ("lion", "bf16"): 3.8, ("lion", "int8"): 5.4,
    ("sgd", "fp32"): 1.5, ("sgd", "bf16"): 3.4, ("sgd", "int8"): 5.0,
    ("adafactor", "fp32"): 5.2,
}  # fmt: skip
"""Our other updates over torch's fused AdamW, for a 1B model on one H200 (benchmarks/optimizers.py --device cuda)."""
_FUSED = 0.84
"""Fraction of the bandwidth of elementwise kernels that the fused AdamW reached there: 11.2 ms for 28 bytes each."""


def update_launches(job: Job) -> float:
    """The host's work for an update, in multiples of a bare launch."""
    return _TENSOR_LAUNCHES * tensor_count(job.model)


def update_s(job: Job, device: Device, parameters: float, gradient_bytes: int, *, own: bool) -> float:
    """The update of a rank's share; `own` is our trainer, which on one GPU may do it in one pass."""
    one_pass = own and updates_in_one_pass(job)
    fused = _adamw_s(job, device, parameters, gradient_bytes if one_pass else 4, one_pass=one_pass)
    slower = _TIMES_ADAMW.get((job.optimizer.name, job.precision.optimizer_states), 1.0) - 1.0
    return fused + slower * memory_s(device, ADAMW_MOVED_BYTES * parameters / _FUSED, 1)


def _adamw_s(job: Job, device: Device, parameters: float, gradient_bytes: int, *, one_pass: bool) -> float:
    """Adam over a rank's share: masters, moments and gradients read, all but gradients written, a working copy
    produced."""
    clip = job.optimizer.clip > 0
    if device.operations is not None:
        found = device.operations.update_s(parameters, tensor_count(job.model))
        if found is not None:
            narrow = job.precision.number_bytes < MASTER_BYTES
            return found + (memory_s(device, parameters * (4 + 2), 1) if narrow else 0.0)
    moved = parameters * (12 + gradient_bytes + 12 + 2)
    if one_pass:
        on_device = memory_s(device, moved / _ONE_PASS + (parameters * gradient_bytes if clip else 0.0), 2)
        return max(on_device, update_launches(job) * bare_launch_s(device, own=True))
    if device.measured is not None and device.measured.update_s_per_parameter is not None:
        # the working copy is made from the masters, and the norm reads all gradients
        copies = memory_s(device, parameters * (4 + 2 + (gradient_bytes if clip else 0)), 2)
        return parameters * device.measured.update_s_per_parameter + copies
    if clip:
        moved += parameters * gradient_bytes
    return memory_s(device, moved, 4)
