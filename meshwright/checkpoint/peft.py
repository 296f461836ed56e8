"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, written and read.

PEFT names modules as transformers does. Projections that are one module there (GPT-2's q, k and v) have one adapter
there and several here, and are refused.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.atomic import new_folder
from meshwright.checkpoint.hf_read import parameter_sizes
from meshwright.checkpoint.reading import Checkpoint
from meshwright.checkpoint.tensorfile import Planned, read_header, read_window, write_safetensors
from meshwright.checkpoint.weights import StoredWeights
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.job.adapter import ADAPTER_CONFIG
from meshwright.model.adapter import MAGNITUDE, A, B, is_adapter
from meshwright.model.hf_places import spans_of
from meshwright.model.numbers import DTYPES

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}


def export_adapter(run: Path, out: Path, shape: Model, checkpoint: Checkpoint | None = None) -> tuple[int, int]:
    """Write a run's adapters as a folder that PEFT loads, completely or not at all; returns the step and the bytes."""
    if shape.adapter is None:
        raise UserError(f"{run} trained all weights, not model.adapter; export it without --adapter")
    names = _names(shape)
    weights = StoredWeights(run, checkpoint)
    tensors = [
        Planned(names[name], size, DTYPES["fp32"], _rows(weights, name)) for name, size in weights.sizes.items()
    ]
    total = sum(tensor.bytes for tensor in tensors)
    with new_folder(out, total) as draft:
        write_safetensors(draft / WEIGHTS, tensors, {"format": "pt"})
        text = json.dumps(_config(shape, names), indent=2) + "\n"
        (draft / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return weights.step, total


class PeftAdapter:
    """The adapters of a folder that PEFT wrote, under our names; opening it reads only headers."""

    def __init__(self, folder: Path, shape: Model) -> None:
        self._path, self._names = folder / WEIGHTS, _names(shape)
        if not self._path.is_file():
            raise UserError(f'model.adapter.init_from = "{folder}" has no {WEIGHTS}; save the adapter with PEFT')
        stored = read_header(self._path)[0]
        sizes = {name: size for name, size in parameter_sizes(shape).items() if is_adapter(name)}
        for name, size in sizes.items():
            found = stored.pop(self._names[name], None)
            if found is None or found.size != size:
                what = "nothing" if found is None else f"the size {found.size}"
                raise UserError(
                    f'model.adapter.init_from = "{folder}" has {what} for {self._names[name]}, where {size} is needed; '
                    "set model.adapter.targets to the projections it adapts"
                )
        if stored:
            raise UserError(
                f'model.adapter.init_from = "{folder}" has {min(stored)}, which model.adapter.targets = '
                f"{list(shape.adapter.targets) if shape.adapter else []} leaves out; name its projection there"
            )

    def rows(self, name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        """Some rows of an adapter's parameter."""
        return read_window(self._path, self._names[name], itemgetter(rows))


def _names(shape: Model) -> dict[str, str]:
    """PEFT's name of every parameter of an adapter."""
    sizes = parameter_sizes(shape)
    ours = {name.rpartition(".")[0] for name in sizes if is_adapter(name)}
    modules = {module: _module(shape, f"{module}.weight", sizes) for module in ours}
    shared = {stored for stored, count in Counter(modules.values()).items() if count > 1}
    everywhere = {_module(shape, name, sizes) for name in sizes if name.endswith(".weight") and _cut(shape, name, sizes)}
    for module, stored in sorted(modules.items()):
        if stored in shared | everywhere:
            raise UserError(
                f"model.adapter.targets adapts {module}, which is one module with others in transformers and PEFT "
                f"({stored}); leave it out, or export the merged model"
            )
    adapted = [name for name in sizes if is_adapter(name)]
    return {name: f"{_PREFIX}{modules[name.rpartition('.')[0]]}.{_ENDS[name.rpartition('.')[2]]}" for name in adapted}


def _module(shape: Model, weight: str, sizes: dict[str, tuple[int, ...]]) -> str:
    [span] = spans_of(shape.base, weight, sizes[weight])
    return span.tensor.removesuffix(".weight")


def _rows(weights: StoredWeights, name: str) -> Callable[[slice], Tensor]:
    return lambda rows: weights.read(name, (rows,))
