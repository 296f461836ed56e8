"""How long a step waits for the host that launches its kernels.

The host launches ahead of the device until it reads the loss: launches hide behind everything that the device still has
to do by then. So a large model's update hides the launches of the next forward, and the loss those of the backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from meshwright.job import Job
from meshwright.plan.compute import Work, loss_chunks
from meshwright.plan.kernels import Device
from meshwright.plan.launches import bare_launch_s, own_launches
from meshwright.plan.software import Software
from meshwright.plan.update import update_launches

FORWARD, BACKWARD, BETWEEN = "forward waits for the host", "backward waits for the host", "host"
"""The device's waits by name."""

# The host's work in multiples of a bare launch, chosen with steps of 4M and 1B parameters over 128 and 256 tokens
# (benchmarks/utilisation.py), in which the device has next to nothing to do.
_BETWEEN_STEPS = 35.0
"""Reading the loss, recording the step, taking the next batch."""
_ENDS = 30.0
"""The embedding, positions, the final norm and what surrounds the loss."""
_CHUNK = 12.0
"""One chunk of the loss: logits, their gradient, and two products with it."""
_SIMULATED = 3
"""Micro-batches after which every one waits as long as the one before."""


@dataclass(frozen=True)
class Region:
    """Work that the host launches and the device does, one after the other."""

    wait: str
    """The name of the device's wait for it."""
    host_s: float
    device_s: float


def runs_ahead(job: Job, device: Device, software: Software) -> bool:
    """Whether the host meets the device only where it reads the loss.

    Stages of a pipeline wait for each other, and tensor-parallel ranks at every product; a CPU is its own host. What
    other programs do is not known so exactly.
    """
    on_cpu = device.measured is not None and device.measured.on_cpu
    return software.own and not on_cpu and job.layout.tp == job.layout.pp == 1


def step_waits(
    job: Job,
    device: Device,
    software: Software,
    modes: Sequence[str],
    passes: tuple[float, float],
    head: Work,
    update_s: float | None,
) -> dict[str, float]:
    """A step's waits for the host, given what the device takes for a micro-batch's forward and backward, the head's
    part of them, and the update; None if the host does that itself."""
    bare_s = bare_launch_s(device, own=True)
    blocks = [own_launches(job, software, mode) for mode in modes]
    forward, backward = (sum(block[part] for block in blocks) * bare_s for part in range(2))
    chunks = loss_chunks(job)[0] * (1 + job.model.extra_tokens)
    before = [Region(BETWEEN, _BETWEEN_STEPS * bare_s, 0.0)]
    if update_s is not None:
        before.insert(0, Region(BETWEEN, update_launches(job) * bare_s, update_s))
    micro_batch = [
        Region(FORWARD, forward + _ENDS * bare_s, passes[0] - head.forward),
        Region(FORWARD, chunks * _CHUNK * bare_s, head.forward + head.backward),
        Region(BACKWARD, backward, passes[1] - head.backward),
    ]
    return waits(before, micro_batch, job.accumulation)


def least_s(job: Job, device: Device, software: Software, modes: Sequence[str]) -> float:
    """What the host of a rank with some of the layers launches in a step: no step of ours is shorter, whoever waits for
    whom."""
    if not software.own or (device.measured is not None and device.measured.on_cpu):
        return 0.0
    share = len(modes) / job.model.blocks
    blocks = sum(sum(own_launches(job, software, mode)) for mode in modes)
    ends = share * (_ENDS + loss_chunks(job)[0] * _CHUNK)
    once = _BETWEEN_STEPS + share * update_launches(job)
    return (job.accumulation * (blocks + ends) + once) * bare_launch_s(device, own=True)


def waits(before: Sequence[Region], micro_batch: Sequence[Region], times: int) -> dict[str, float]:
    """How long the device waits in all, by name, where `before` is followed by so many equal micro-batches."""
    found = _by_name(chain(before, *repeat(micro_batch, min(times, _SIMULATED))))
    if times > _SIMULATED:
        fewer = _by_name(chain(before, *repeat(micro_batch, _SIMULATED - 1)))
        for name in found:
            found[name] += (times - _SIMULATED) * (found[name] - fewer[name])
    return found


def _by_name(regions: Iterable[Region]) -> dict[str, float]:
    found = dict.fromkeys((FORWARD, BACKWARD, BETWEEN), 0.0)
    host = device = 0.0
    for region in regions:
        host += region.host_s
        device += region.device_s
        if device < host:  # its last kernel is launched only now
            found[region.wait] += host - device
            device = host
    return found
