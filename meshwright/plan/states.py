"""What a rank holds all the time: weights, gradients and optimizer states by zero stage, and what zero 3 gathers."""

from meshwright.cost import MASTER_BYTES, Elements, Frozen, layer_elements, layer_frozen, sharers, state_bytes
from meshwright.job import FORMAT_BYTES, Job
from meshwright.layout import gradient_format, ranks_of
from meshwright.plan.compute import products_of
from meshwright.plan.software import Software

Terms = dict[str, float]
"""Bytes by name."""


def state_terms(job: Job, software: Software, elements: Elements, in_blocks: float, at_once: int) -> Terms:
    """Weights, gradients and optimizer states by zero stage; under a pipeline gradients stay whole until the end.

    `in_blocks` is the share of the parameters that is in blocks, `at_once` how many blocks are gathered at once.
    """
    layout, zero, parameters = job.layout, job.layout.zero_stage, elements.total
    sharded = elements.owned(job)
    shared = sharded if zero >= 1 else parameters
    narrow = job.precision.number_bytes < MASTER_BYTES
    gradient = gradient_bytes(job, software)
    moments = state_bytes(job, in_blocks * shared, (1 - in_blocks) * shared)
    sharded_gradients = zero >= 2 and not (layout.pp > 1 and not software.weights_apart)
    if software.weights_apart:
        half = job.precision.format == "fp16"
        summed_narrow = software.reduced_bytes == 2 and not software.narrow_gradients
        gradient = 2 if half or summed_narrow else 4
        whole = sharded if sharded_gradients else parameters
        terms = {
            "weights": 2.0 * (sharded if zero == 3 else parameters),
            "gradients": gradient * whole,
            "optimizer states": MASTER_BYTES * shared + moments,
        }
        if job.precision.format in software.narrow_gradients:
            wide = 6.0 if software.flat_gradients else 4.0
            terms["gradients in the other format"] = wide * shared if half else 2.0 * whole
        if zero > 0 and sharers(job) > 1 and software.bucket_elements:
            # Sums in 32 bits are copied by whole tensors, and the table of words may be more than a bucket.
            table = job.model.vocab_size * job.model.width / layout.tp
            terms["a bucket of gradients"] = gradient * max(software.bucket_elements, table if gradient == 4 else 0.0)
        return terms | gathered_terms(job, software, at_once, tables=in_blocks < 1)
    # The parameter is the master. A working copy is gathered: for the whole step, or under zero 3 for use. Torch makes
    # it in fp32 as well, and also where nobody shares the parameters; on one device there is none.
    copied = narrow or (software.own and ranks_of(layout) > 1)
    terms = {
        "weights": MASTER_BYTES * shared,
        "working weights": working_bytes(job) * parameters if copied and zero < 3 else 0.0,
        "gradients": gradient * shared,
        "optimizer states": moments,
    }
    gathered = gathered_terms(job, software, at_once, tables=in_blocks < 1 or not software.own)
    if zero == 0 or not (layout.pp > 1 or (zero == 1 and job.accumulation > 1)):
        return terms | gathered
    unreduced = {"gradients before they are reduced": gradient * parameters}
    if not software.own:  # counted as peaks of other programs were met best
        return terms | unreduced | gathered
    # Whole until they are reduced, unit by unit, when no activation is left: then shards take their place.
    return terms | gathered | unreduced | {"gradients": 0.0}


def frozen_terms(job: Job, frozen: Frozen) -> Terms:
    """What is not trained: whole on every rank, unless zero 3 shards it."""
    if job.model.adapter is None:
        return {}
    shares = sharers(job) if job.layout.zero_stage == 3 else 1
    return {"frozen weights": frozen.shared / shares + frozen.whole}


def working_bytes(job: Job) -> float:
    """Bytes of a parameter as it is computed with: fp8 is cast from 16 bits."""
    return 2.0 if job.precision.number_bytes < MASTER_BYTES else float(MASTER_BYTES)


def gradient_bytes(job: Job, software: Software) -> int:
    """Bytes of a gradient until the update: as requested, or as the backward computes it where nothing is summed."""
    if software.own:
        return FORMAT_BYTES[gradient_format(job)]
    return job.precision.gradient_bytes


def gathered_terms(job: Job, software: Software, at_once: int, *, tables: bool) -> Terms:
    """Under zero 3, the blocks that are gathered at once, and the gradients of one in transit; `tables` says whether
    the rank has the embedding or the head."""
    layout = job.layout
    if layout.zero_stage < 3 or layout.dp_shard * layout.cp == 1:
        return {}
    adapters = job.model.adapter is not None
    table = job.model.vocab_size * job.model.width / layout.tp if tables else 0.0
    unit, reduced = layer_elements(job).total, 0.0 if adapters else table
    if software.gathers == "weight":
        unit = max(columns * inner for _, columns, inner in products_of(job, software))
        at_once = 1 + layout.prefetch
    return {
        "gathered parameters": working_bytes(job) * (at_once * unit + table) + at_once * layer_frozen(job).shared,
        "gradients before they are reduced": (working_bytes(job) + 4.0) * max(unit, reduced),
    }
