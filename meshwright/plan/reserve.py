"""What the device holds beyond the tensors of a step: the allocator's gaps, and buffers of communicators."""

from meshwright.job import Job
from meshwright.plan.compute import feedforward_width, tokens_of
from meshwright.plan.experts import rows_of
from meshwright.plan.software import Software

FRAGMENTS = 0.03
"""Our own trainer's overhead over what is allocated: rounding, and gaps too small to use."""
_ROUNDED = 0.02
"""The same of other programs, but for the one gap that counts (`reserve_bytes`)."""
COMMUNICATOR_BYTES = 0.35e9
"""Buffers of a communicator."""


def reserve_bytes(job: Job, software: Software, allocated: float, *, first: bool, last: bool) -> tuple[float, float]:
    """What the allocator takes from the device beyond what is `allocated`, on a rank with the model's first or last
    stage: rounding, and a gap that it gives back before it fails.

    A tensor needs one free piece as long as itself. Of memory that was freed in smaller pieces, as much as the largest
    of a step's tensors lies idle: Megatron's runs of eight configurations reserved 2% and one such tensor (SimuMax's
    simulator prints both figures), torchtitan's the same. Ours never makes one that is much larger than the others.
    """
    if software.own:
        return FRAGMENTS * allocated, 0.0
    return _ROUNDED * allocated, largest_tensor(job, software, first=first, last=last)


def largest_tensor(job: Job, software: Software, *, first: bool, last: bool) -> float:
    """Bytes of the largest tensor that a micro-batch makes and frees: of the inner width, scores, logits, or the
    gradient of a table of words."""
    model, tp, tokens = job.model, job.layout.tp, tokens_of(job)
    gates = 2 if model.activation == "swiglu" and software.fusion == "fused" else 1
    sizes = [2.0 * gates * tokens * feedforward_width(model) / tp]
    if model.experts is not None:
        sizes.append(2.0 * rows_of(job) * max(2 * model.experts.ffn_width, model.width))
    if software.attention == "fused-softmax":
        sizes.append(2.0 * score_count(job))
    if last and software.logit_bytes is not None:
        each = 4.0 if software.logit_bytes > 4 else 2.0
        sizes.append(each * tokens * model.vocab_size / tp)
    if first or last:
        sizes.append(2.0 * model.vocab_size * model.width / tp)
    return max(sizes)


def score_count(job: Job) -> float:
    """Attention's scores of a micro-batch on one rank, where they are written out."""
    return job.batch.micro_batch * job.batch.sequence_length**2 * job.model.heads / job.layout.tp


def communicator_bytes(job: Job, software: Software) -> float:
    """Buffers of the communicators a rank takes part in: one for each axis with more than one rank, and what a program
    makes beside them."""
    layout = job.layout
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, job.data_parallel, layout.ep))
    return (axes + (software.communicators if axes else 0)) * COMMUNICATOR_BYTES
