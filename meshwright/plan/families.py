"""What one block, the embedding and the head take in every degree, micro-batch and format that a search tries."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost import layer_parameters, stage_parameters
from meshwright.job import Job
from meshwright.plan.compute import block_work, embedding_work, head_work, products_of
from meshwright.plan.kernels import Device, device_of, matmul_at_once
from meshwright.plan.machine import Machine
from meshwright.plan.memory import block_bytes, side_by_side
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.space import KINDS, degrees_of, micro_batches_of, ways_of, with_degrees, with_way
from meshwright.plan.step import groups_of, shared_s


@dataclass(frozen=True)
class Family:
    """What is the same for all layouts with these degrees, this micro-batch and this arithmetic."""

    job: Job
    """In this arithmetic, on one tensor- and context-parallel group."""
    forward_s: float
    """A block's, with its transfers."""
    backward_s: tuple[float, ...]
    """By kind of recomputation."""
    ends_s: tuple[float, float, float, float]
    """Forward and backward of the embedding, and of the head."""
    kept_bytes: tuple[float, ...]
    """By kind of recomputation."""
    layer_elements: float
    ends_elements: tuple[float, float, float]
    """Beside the blocks: of a first stage, of a last one, and of one that is both."""
    step_s: float
    """The host's own work once a step, if it cannot hide behind the device's."""


def families_of(job: Job, machine: Machine, allow: frozenset[str], *, at_once: bool = False) -> Iterator[Family]:
    """Every degree of tensor and context parallelism, every micro-batch and format that the job may take."""
    micros = micro_batches_of(job.batch.global_batch, machine.gpus if at_once else None)
    for compute, compiled in ways_of(job, machine.gpu, allow):
        way = with_way(job, compute, compiled)
        device = device_of(machine.gpu, machine.rates, compute, machine.measured)
        software = MESHWRIGHT_COMPILED if compiled else MESHWRIGHT
        groups = [[with_degrees(way, tp, cp, micro) for micro in micros] for tp, cp in degrees_of(way, machine.gpus)]
        _warm(device, software, [each for group in groups for each in group])
        for group in groups:
            yield from _families(group, device, software, machine)


def _warm(device: Device, software: Software, jobs: list[Job]) -> None:
    """Compute every product of every family at once."""
    sizes = [size for job in jobs for size in products_of(job, software)]
    matmul_at_once(device, "forward", sizes)
    matmul_at_once(device, "input", [(rows, inner, columns) for rows, columns, inner in sizes])
    matmul_at_once(device, "weight", [(columns, inner, rows) for rows, columns, inner in sizes])


def _families(jobs: list[Job], device: Device, software: Software, machine: Machine) -> Iterator[Family]:
    """Those of one tensor- and context-parallel group: what a block keeps grows with the micro-batch."""
    one = jobs[0]
    copies = {"none": side_by_side(one, software)}  # of weights: as many whatever the micro-batch
    each = [(block_bytes(one, software, kind)[0] - copies.get(kind, 0.0)) / one.batch.micro_batch for kind in KINDS]
    block = layer_parameters(one)
    first, last = (stage_parameters(one, 0, first=first, last=not first) for first in (True, False))
    both = stage_parameters(one, 0, first=True, last=True)
    for job in jobs:
        groups = groups_of(job, machine.wires.gpus_per_node)
        works = [block_work(job, device, software, kind) for kind in KINDS]
        sent = [
            shared_s(job, device, software, machine.wires, groups, kind, work)
            for kind, work in zip(KINDS, works, strict=True)
        ]
        embedding, head = embedding_work(job, device), head_work(job, device, software)
        yield Family(
            job,
            works[0].forward + sent[0][0],
            tuple(work.backward + backward for work, (_, backward) in zip(works, sent, strict=True)),
            (embedding.forward, embedding.backward, head.forward, head.backward),
            tuple(job.batch.micro_batch * size for size in each),
            block,
            (first, last, both),
            0.0 if one.layout.tp == 1 else software.step_s,
        )
