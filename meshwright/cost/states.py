"""What an optimizer keeps for each parameter and what a checkpoint takes: the one place that counts moments."""

from math import sqrt

from meshwright.cost.parameters import block_elements, trained_parameters
from meshwright.job import FORMAT_BYTES, Job
from meshwright.job.training import Optimizer, Precision
from meshwright.registries import own_state_bytes

MASTER_BYTES = FORMAT_BYTES["fp32"]
SCALED_COLUMNS = 128
"""Most columns of a row that share a scale, which is a number of fp32, where moments have 8 bits."""
ADAMW_MOVED_BYTES = 28.0
"""Read and written of an entry by AdamW in fp32: master, gradient and both moments, all but the gradient back."""


def moments_of(optimizer: Optimizer, *, projection: bool = True) -> int:
    """Numbers kept for an entry of a matrix: of one of a block's projections, or of embedding and head."""
    moments = {
        "adamw": 2,
        "lion": 1,
        "sgd": 1 if optimizer.momentum else 0,
        "muon": 1 if projection else 2,  # which leaves the rest to AdamW
        "adafactor": 0,  # a row and a column of every matrix, thousandths of it
    }
    return moments[optimizer.name]


def moment_bytes(precision: Precision) -> float:
    """Bytes of one moment of one entry; in narrow matrices scales are shared by fewer columns."""
    scale = FORMAT_BYTES["fp32"] / SCALED_COLUMNS if precision.optimizer_states == "int8" else 0.0
    return FORMAT_BYTES[precision.optimizer_states] + scale


def state_bytes(job: Job, projections: float, others: float) -> float:
    """Bytes of the moments of so many entries of projections, and of embedding and head."""
    if (own := own_state_bytes(job.optimizer.name)) is not None:
        return own * (projections + others)
    kept = moments_of(job.optimizer) * projections + moments_of(job.optimizer, projection=False) * others
    return moment_bytes(job.precision) * kept


def checkpoint_bytes(job: Job, parameters: int) -> float:
    """What a checkpoint of a model with so many parameters takes: the masters and their moments; of a model that is not
    trained as a whole those of what is."""
    if job.model.freezes:
        parameters = trained_parameters(job.model)
    projections = min(float(parameters), job.model.blocks * block_elements(job.model).total)
    return MASTER_BYTES * parameters + state_bytes(job, projections, parameters - projections)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between checkpoints that loses least to saving and to repeating: √(2 · cost · time between failures).

    Young (CACM 17, 1974) and, to first order, Daly (FGCS 22, 2006).
    """
    return sqrt(2.0 * cost_s * mtbf_s)
