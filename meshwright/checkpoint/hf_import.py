"""A Hugging Face folder's weights as the checkpoint of a run at step 0."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.catalogue import checkpoint_path
from meshwright.checkpoint.hf_read import HfWeights, parameter_sizes
from meshwright.checkpoint.records import Facts, PieceRecord, TensorRecord
from meshwright.checkpoint.shares import record_share, seal
from meshwright.checkpoint.tensorfile import DTYPE_NAMES, Planned, Report, write_safetensors
from meshwright.checkpoint.weights import PREFERENCE
from meshwright.job import Model

FILE = "model.safetensors"


def import_weights(
    folder: Path, shape: Model, run: Path, job: dict[str, Any], report: Report = lambda done: None
) -> Path:
    """Write the folder's weights, as fp32 masters under our names, into a run folder that is still being created."""
    source = HfWeights(folder, shape)
    source.require()
    sizes = parameter_sizes(shape)
    path = checkpoint_path(run, 0)
    path.mkdir(parents=True)
    tensors = [Planned(name, size, torch.float32, partial(source.rows, name, size)) for name, size in sizes.items()]
    records = {f"model/{name}": _record(size) for name, size in sizes.items()}
    if (preferences := source.preferences()) is not None:
        tensors.append(Planned.of(PREFERENCE.partition("/")[2], preferences))
        records[PREFERENCE] = _record(tuple(preferences.shape))
    file = write_safetensors(path / FILE, tensors, report=report)
    record_share(path, 0, {FILE: file}, records)
    seal(path, Facts(step=0, tokens=0, position=0), attempt=0, ranks=1, job=job)
    return path


def _record(size: tuple[int, ...]) -> TensorRecord:
    whole = PieceRecord(file=FILE, offsets=(0,) * len(size), shape=size)
    return TensorRecord(shape=size, dtype=DTYPE_NAMES[torch.float32], pieces=(whole,))
