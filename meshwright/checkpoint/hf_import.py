"""A Hugging Face folder's weights as the weights of a run at step 0."""

from functools import partial
from pathlib import Path

import torch

from meshwright.checkpoint.hf_read import HfWeights, parameter_sizes
from meshwright.checkpoint.streamed import Planned, Report, write_safetensors
from meshwright.checkpoint.weights import weights_path
from meshwright.job import Model


def import_weights(folder: Path, shape: Model, run: Path, report: Report = lambda done: None) -> Path:
    """Write the folder's weights, as fp32 masters under our names, into a run folder that is still being made."""
    source = HfWeights(folder, shape)
    source.require()
    tensors = [
        Planned(name, size, torch.float32, partial(source.rows, name, size))
        for name, size in parameter_sizes(shape).items()
    ]
    path = weights_path(run, 0)
    path.parent.mkdir(parents=True)
    write_safetensors(path, tensors, {"step": "0"}, report)
    return path
