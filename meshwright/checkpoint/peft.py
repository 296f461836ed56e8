"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, written and read.

PEFT names modules as transformers does. Projections that are one module there (GPT-2's q, k and v) have one adapter
there and several here, and are refused.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
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
from meshwright.job.adapter import ADAPTER_CONFIG, adaptable
from meshwright.model.adapter import MAGNITUDE, A, B, is_adapter
from meshwright.model.hf_places import spans_of
from meshwright.model.numbers import DTYPES

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"^.*\.\d+\.")
_ENDS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}


def export_adapter(run: Path, out: Path, shape: Model, checkpoint: Checkpoint | None = None) -> tuple[int, int]:
    """Write a run's adapters as a folder that PEFT loads, completely or not at all; returns the step and the bytes."""
    if shape.adapter is None:
        raise UserError(f"{run} trained all weights, not model.adapter; export it without --adapter")
    names = _names(shape)
    weights = StoredWeights(run, checkpoint)
    tensors = [Planned(names[name], size, DTYPES["fp32"], _rows(weights, name)) for name, size in weights.sizes.items()]
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
    modules = {}
    for layer, (group, names) in product(range(shape.layers), adaptable(shape).items()):
        for module in (f"layers.{layer}.{group}.{name}" for name in names):
            if (size := sizes.get(f"{module}.weight")) is not None:
                [span] = spans_of(shape.base, f"{module}.weight", size)
                modules[module] = span.tensor.removesuffix(".weight")
    together = Counter(modules.values())
    found = {}
    for name in filter(is_adapter, sizes):
        module, _, kind = name.rpartition(".")
        if together[modules[module]] > 1:
            raise UserError(
                f"model.adapter.targets adapts {module}, which PEFT has no adapter for: in transformers it is a part "
                f"of {modules[module]}; leave it out, or export the merged model"
            )
        found[name] = f"{_PREFIX}{modules[module]}.{_ENDS[kind]}"
    return found


def _config(shape: Model, names: dict[str, str]) -> dict[str, Any]:
    """What PEFT reads of the adapters; modules are named as they are in every layer."""
    adapter = shape.adapter
    assert adapter is not None
    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names.values()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.init_from,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": sorted({_LAYER.sub("", module) for module in modules}),
        "fan_in_fan_out": shape.positions == "learned",
        "bias": "none",
        "modules_to_save": None,
    }


def _rows(weights: StoredWeights, name: str) -> Callable[[slice], Tensor]:
    return lambda rows: weights.read(name, (rows,))
