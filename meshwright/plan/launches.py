"""How long a host takes to launch a block's kernels, and how long the device waits for it."""

from meshwright.cost import REPEATED
from meshwright.job import Job
from meshwright.plan.kernels import Device
from meshwright.plan.software import Software

_ROUTING_OPERATIONS = 45
"""Operations of a router, of rows sorted, gathered and summed, and of grouped products: counted in our code."""
USUAL_LAUNCH_S = 4.5e-6
"""A bare operation's launch on the hosts whose programs' launches are in `software`."""
_OWN_LAUNCH_S = 9.9e-6
"""The same where our own trainer runs and its host was not measured: as beside the one GPU that was, so that two cards
do not differ by their hosts."""


def bare_launch_s(device: Device, *, own: bool) -> float:
    """What launching a bare operation takes the host: as its profile measured it, or as usual."""
    measured = None if device.measured is None else device.measured.profile.launch_s
    return measured or (_OWN_LAUNCH_S if own else USUAL_LAUNCH_S)


def host_waits(
    job: Job, device: Device, software: Software, mode: str, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """How long a block's forward and backward, transfers included, wait for a host that launches kernels more slowly.

    Ranks that share every product meet at each collective, where sometimes one's host is late and sometimes another's
    device: there neither hides behind the other in full.
    """
    if device.measured is not None and device.measured.on_cpu:
        return 0.0, 0.0  # there is no other device that waits: starting an operation is part of it
    bare_s = bare_launch_s(device, own=software.own)
    if software.own:
        forward, backward = (count * bare_s for count in own_launches(job, software, mode))
    else:
        forward = kernels_of(job, software) * software.launch_s * bare_s / USUAL_LAUNCH_S
        backward = (3 if mode in REPEATED else 2) * forward
    if software.blocking or (software.waits_for_counts and job.model.experts is not None):
        return forward, backward
    waits = []
    for device_s, host_s in ((forward_s, forward), (backward_s, backward)):
        both = max(host_s, device_s) if job.layout.tp == 1 else (host_s**3 + device_s**3) ** (1 / 3)
        waits.append(both - device_s)
    return waits[0], waits[1]


def own_launches(job: Job, software: Software, mode: str) -> tuple[float, float]:
    """The host's work for one of our blocks, forward and backward, in multiples of a bare launch.

    Fitted to blocks of GPT-2, Llama and Qwen3 with so few tokens that an H200 waits for its host (benchmarks/LOG.md):
    an eager operation is more than two launches with its autograd; a compiled block's guards and wrappers cost more
    than its few kernels; torch's hooks for recomputation cost as much as many operations.
    """
    model = job.model
    operations = 12 + 2 * (model.activation == "swiglu") + 20 * (model.positions == "rope") + 4 * model.qk_norm
    operations += 2 * (job.layout.tp > 1) + (_ROUTING_OPERATIONS if model.experts else 0)
    if software.fusion == "fused":
        forward = 33 + 0.75 * operations
        casts = (50, 22) if job.precision.format == "fp8" else (0, 0)
        again = {"full": 8.0, "segment": forward, "joined": forward}.get(mode, 0.0)  # inside the graph, or around it
        return forward + casts[0], 1.6 * forward + casts[1] + again
    forward = 2.65 * operations
    backward = 1.4 * forward + 66
    if mode in REPEATED:
        return forward + 50, backward + forward + 45
    return (forward + 150, backward + 100) if mode == "selective" else (forward, backward)


def kernels_of(job: Job, software: Software) -> int:
    """Kernels a block's forward launches in other programs than ours."""
    kernels = {"fused": 14, "eager": 22}[software.fusion]
    kernels += 12 if software.attention == "fused-softmax" else 0
    kernels += 2 if job.layout.tp > 1 else 0
    if job.model.experts is not None:
        held = job.model.experts.count // job.layout.ep
        casts = 2 if job.precision.format == "fp8" else 1
        kernels += 40 + 2 * casts * held * software.expert_calls
    return kernels
