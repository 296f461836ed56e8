"""What one block, the embedding and the head take in every degree, micro-batch and format that a search tries."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost import Elements, layer_elements, stage_elements
from meshwright.job import Job
from meshwright.plan.compute import block_work, embedding_work, head_work, products_of
from meshwright.plan.experts import transfers_s, without_experts
from meshwright.plan.extra_tokens import extra_work
from meshwright.plan.groups import groups_of
from meshwright.plan.kept import block_bytes, side_by_side
from meshwright.plan.kernels import Device, device_of, matmul_at_once
from meshwright.plan.machine import Machine
from meshwright.plan.predict import own_software
from meshwright.plan.software import Software
from meshwright.plan.space import KINDS, degrees_of, micro_batches_of, ways_of, with_degrees, with_way
from meshwright.plan.stages import shared_s


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
    layer: Elements
    """A block's parameters."""
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
        degrees = degrees_of(way, machine.gpus)
        groups = [[with_degrees(way, tp, cp, ep, micro) for micro in micros] for tp, cp, ep in degrees]
        _warm(device, own_software(way), [each for group in groups for each in group])
        for group in groups:
            yield from _families(group, device, own_software(group[0]), machine)


def _warm(device: Device, software: Software, jobs: list[Job]) -> None:
    """Compute every product of every family at once."""
    sizes = [size for job in jobs for size in products_of(job, software)]
    matmul_at_once(device, "forward", sizes)
    matmul_at_once(device, "input", [(rows, inner, columns) for rows, columns, inner in sizes])
    matmul_at_once(device, "weight", [(columns, inner, rows) for rows, columns, inner in sizes])


def _families(jobs: list[Job], device: Device, software: Software, machine: Machine) -> Iterator[Family]:
    """Those of one tensor-, context- and expert-parallel group: what a block keeps grows with the micro-batch.

    Where the first layers of a mixture have no experts, a block takes as little as the lesser of both kinds.
    """
    one = jobs[0]
    kinds = [one, without_experts(one)] if one.model.experts and one.model.experts.first_dense else [one]
    each = [min(column) for column in zip(*(_kept(kind, software) for kind in kinds), strict=True)]
    block = layer_elements(one)
    if len(kinds) > 1:
        block = Elements(min(block.plain, layer_elements(one, 0).plain), block.experts)
    first, last = (stage_elements(one, range(0), first=first, last=not first).plain for first in (True, False))
    both = stage_elements(one, range(0), first=True, last=True).plain
    for job in jobs:
        alike = [job, without_experts(job)][: len(kinds)]
        passes = [
            min(column) for column in zip(*(_passes(kind, device, software, machine) for kind in alike), strict=True)
        ]
        embedding, head = embedding_work(job, device), head_work(job, device, software)
        if further := job.model.extra_tokens:
            head += extra_work(job, device, software) + block_work(job, device, software, "none") * further
        yield Family(
            job,
            passes[0],
            tuple(passes[1:]),
            (embedding.forward, embedding.backward, head.forward, head.backward),
            tuple(job.batch.micro_batch * size for size in each),
            block,
            (first, last, both),
            0.0 if one.layout.tp == 1 else software.step_s,
        )


def _kept(job: Job, software: Software) -> list[float]:
    """Bytes a block keeps of one sequence, by kind of recomputation."""
    copies = {"none": side_by_side(job, software)}  # of weights: as many whatever the micro-batch
    return [(block_bytes(job, software, kind)[0] - copies.get(kind, 0.0)) / job.batch.micro_batch for kind in KINDS]


def _passes(job: Job, device: Device, software: Software, machine: Machine) -> list[float]:
    """A block's forward, and its backward by kind of recomputation, with their transfers."""
    wires, groups = machine.wires, groups_of(job, machine.wires.gpus_per_node)
    forward, backward = 0.0, []
    for kind in KINDS:
        work = block_work(job, device, software, kind)
        tensor = shared_s(job, device, software, wires, groups, kind, work)
        rows = transfers_s(job, wires, groups.experts, software, kind, (work.forward, work.backward))
        forward = forward or work.forward + tensor[0] + rows[0]
        backward.append(work.backward + tensor[1] + rows[1])
    return [forward, *backward]
