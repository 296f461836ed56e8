"""What lives in host memory instead of the device's, and what moving it costs."""

from meshwright.cost import ADAMW_MOVED_BYTES, MASTER_BYTES
from meshwright.job import Job

HOST_UPDATE_BYTES_PER_S = {"server": 150e9, "desktop": 40e9}
"""Memory traffic one machine's cores reach in an update where there is no profile: what 16 cores beside an H200 did,
and what the two memory channels of a machine for a consumer's card allow."""
_CAST_BYTES = 6
"""Memory traffic of casting a number between 16 and 32 bits."""
_UPDATE_SHARE = 0.74
"""Fraction of an update's own rate that updates of one chunk after another reach, between casts and copies to the
device: a 7B model's took 2.45 s where one kernel over as many bytes would take 1.80 (benchmarks/offload.py)."""
_HOST_TERMS = ("weights", "gradients", "optimizer states", "gradients before they are reduced")


def offloads_states(job: Job) -> bool:
    """Whether masters, gradients and optimizer states are on the host: "params" includes "optimizer"."""
    return bool({"optimizer", "params"} & set(job.memory.offload))


def move_to_host(
    job: Job, terms: dict[str, float], block_bytes: float, layer_parameters: float, together: int
) -> float:
    """Take what the job offloads out of a rank's terms, in place; returns the bytes its host holds instead.

    `together` is how many blocks are recomputed together, with their parameters on the device.
    """
    host = 0.0
    if offloads_states(job):
        sharded = job.layout.zero_stage > 0
        for name in _HOST_TERMS if not sharded else _HOST_TERMS[:3]:
            host += terms.pop(name, 0.0)
        if not sharded:
            # A block's gradients, until they are copied; the sum of earlier micro-batches' is brought back for them.
            summed = job.precision.gradient_bytes if job.accumulation > 1 else 0
            terms["gradients on their way to the host"] = layer_parameters * (job.precision.number_bytes + summed)
        if "params" in job.memory.offload and not sharded:
            working = terms.pop("working weights", 0.0)
            host += working
            on_device = (1 + together) * layer_parameters + job.model.vocab_size * job.model.width
            terms["streamed weights"] = 2.0 * on_device
    if "activations" in job.memory.offload:
        kept = terms["activations"]
        stays = min(kept, 2 * block_bytes)
        terms["activations"] = stays
        host += kept - stays
    return host


def offload_phases(
    job: Job,
    parameters: float,
    activation_bytes: float,
    compute_s: float,
    host_bytes_per_s: float,
    update_bytes_per_s: float,
    node_ranks: int,
) -> dict[str, float]:
    """Seconds that transfers to and from the host add to a step, and the update of a rank's `parameters` there."""
    if not job.memory.offload:
        return {}
    moved = 0.0
    if offloads_states(job):
        gradient = job.precision.gradient_bytes
        moved += parameters * (gradient * (2 * job.accumulation - 1) + 2)
        if "params" in job.memory.offload:
            moved += parameters * 2 * 2 * job.accumulation
    if "activations" in job.memory.offload:
        moved += 2 * activation_bytes * job.accumulation
    # Both directions run at once, overlapped with compute; the step waits for the rest.
    transfers = moved / 2 / host_bytes_per_s
    phases = {"waiting for transfers to the host": max(0.0, transfers - compute_s)}
    if offloads_states(job):
        each, share = float(ADAMW_MOVED_BYTES), 1.0
        if job.layout.zero_stage == 0:  # else torch offloads whole shards, and casts them on the device
            narrow = sum(size < MASTER_BYTES for size in (job.precision.gradient_bytes, job.precision.number_bytes))
            each, share = each + narrow * _CAST_BYTES, _UPDATE_SHARE
        phases["update on the host"] = parameters * each * node_ranks / (update_bytes_per_s * share)
    return phases
