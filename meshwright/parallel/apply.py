"""What turns a single-device model into the one a rank runs: the order of transformations, readable as a recipe."""

import torch

from meshwright.job import Job
from meshwright.model import Decoder, initialise
from meshwright.parallel.precision import DTYPES, Weights


def build(job: Job, device: torch.device) -> tuple[Decoder, Weights]:
    """The job's model on its device with its first weights: shape → device → initial values → precision → compile."""
    with torch.device("meta"):
        model = Decoder(job.model)
    model.to_empty(device=device)
    initialise(model, job.run.seed)
    weights = Weights(model, DTYPES[job.precision.compute])
    if job.run.compile:
        for block in model.layers.values():
            block.compile()
    return model, weights
