"""What a whole training run takes: days, GPU-hours, money, energy, and the time lost to failures and checkpoints."""

from dataclasses import dataclass

from meshwright.cost import best_interval_s, checkpoint_bytes, parameter_count
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan.energy import Energy, energy_of
from meshwright.plan.predict import Prediction

_STAGING_BYTES_PER_S = 20e9
"""From one GPU to host memory while training waits: what page-locked copies sustain over all GPUs of a node."""
_RESTART_S = 300.0
"""From a failure to the next step: noticing it, starting processes, compiling; reading the checkpoint comes on top."""
_STORAGE_BYTES_PER_S = 1e9
"""Bytes that storage takes from each node where nobody says: Llama 3's sustained 2 TB/s for 2,048 nodes (arXiv
2407.21783)."""
_DAY_S = 86400.0


@dataclass(frozen=True)
class Economy:
    """A training run over a number of tokens."""

    tokens: float
    days: float
    """With what failures cost, where their rate is known."""
    gpu_hours: float
    cost: float | None
    """If the price of an hour is known."""
    goodput: float | None
    """Share of the time that makes progress; None where the time between failures is not known."""
    save_s: float
    """How long a checkpoint blocks training."""
    save_every_s: float | None
    """The interval that loses the least time."""
    checkpoint_bytes: float
    """What a checkpoint takes on storage: masters and moments."""
    write_s: float
    """How long storage takes to write it, while training goes on, or to read it."""
    storage_guessed: bool
    """Whether the bandwidth of storage is a guess, since cluster.storage_gb_s does not say."""
    energy: Energy | None = None
    """If the power of the GPU is known."""


def economy(job: Job, prediction: Prediction, cluster: Cluster, tokens: float, price: float | None = None) -> Economy:
    """Days, GPU-hours and cost of `tokens`; `price` and cluster.price are of one GPU's hour."""
    gpus = cluster.nodes * cluster.gpus_per_node
    save_s = save_seconds(job, prediction)
    size = checkpoint_bytes(job, parameter_count(job.model))
    storage = cluster.storage_gb_s
    write_s = size / (_STORAGE_BYTES_PER_S * cluster.nodes if storage is None else storage * 1e9)
    goodput = every_s = None
    if cluster.mtbf_hours is not None:
        goodput, every_s = goodput_of(save_s, 3600.0 * cluster.mtbf_hours, write_s)
    seconds = tokens / (prediction.tokens_per_s_per_gpu * gpus) / (goodput or 1.0)
    hours = seconds / 3600.0 * gpus
    each = cluster.price if price is None else price
    cost = None if each is None else hours * each
    saving = (goodput, save_s, every_s, size, write_s, storage is None)
    return Economy(tokens, seconds / _DAY_S, hours, cost, *saving, energy=energy_of(hours, cluster))


def save_seconds(job: Job, prediction: Prediction) -> float:
    """How long training waits for a checkpoint: masters and moments of the fullest rank copied to its host."""
    terms = prediction.fullest.terms
    held = terms.get("weights", 0.0) + terms.get("optimizer states", 0.0)
    # Ranks that hold the same state share the copying; what is already on the host is written from there.
    copies = job.layout.dp_replicate * (job.layout.dp_shard if job.layout.zero_stage == 0 else 1)
    return held / copies / _STAGING_BYTES_PER_S


def goodput_of(save_s: float, mtbf_s: float, write_s: float = 0.0) -> tuple[float, float]:
    """Share of the time that makes progress, and the interval between checkpoints that makes it largest.

    Saving blocks for save_s every interval, and is written in write_s behind the next steps, so that no interval is
    shorter. A failure costs half an interval, what a checkpoint that is still being written would have saved, and the
    restart with its reading (Young, CACM 17, 1974).
    """
    every_s = max(best_interval_s(max(save_s, 1e-3), mtbf_s), save_s, write_s)
    lost = save_s / every_s + (every_s / 2 + write_s + _RESTART_S + write_s) / mtbf_s
    return 1.0 / (1.0 + lost), every_s
