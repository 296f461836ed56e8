"""A Hugging Face folder that transformers loads: safetensors shards with their index, config, tokenizer files."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.atomic import new_folder
from meshwright.checkpoint.adapters import MergedWeights
from meshwright.checkpoint.bitsandbytes import FORMATS
from meshwright.checkpoint.bitsandbytes_write import in_codes, quantization_config, require_packable
from meshwright.checkpoint.hf_files import read_token_ids, write_companions
from meshwright.checkpoint.hf_read import parameter_sizes
from meshwright.checkpoint.reading import Checkpoint
from meshwright.checkpoint.tensorfile import Planned, Report, write_safetensors
from meshwright.checkpoint.weights import StoredWeights
from meshwright.errors import UserError
from meshwright.job import Model, model_to_hf_config
from meshwright.job.adapter import is_projection
from meshwright.job.hub import INDEX, SINGLE
from meshwright.model import hf_tensors, preference_sizes, written_hf_tensors
from meshwright.model.hf_places import Span, spans_of
from meshwright.model.numbers import DTYPES

SHARD_BYTES = 5_000_000_000
"""No shard is larger, unless one tensor is."""

EXPORT_FORMATS = ("fp32", "bf16", "nf4", "int8")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    step: int
    model_type: str
    shards: int
    bytes: int


class Export:
    """A run's weights on their way into a Hugging Face folder, the newest unless one of its checkpoints is given; what
    cannot be exported is refused here."""

    def __init__(
        self, run: Path, shape: Model, dtype: str, checkpoint: Checkpoint | None = None, seed: int = 0
    ) -> None:
        if dtype not in EXPORT_FORMATS:
            raise UserError(
                f"--dtype = {dtype} is not an export format; choose fp32 (the master), bf16, or nf4 or int8 (as "
                "bitsandbytes stores projections)"
            )
        self._run, self._weights, self._shape = run, _weights(run, shape, seed, checkpoint), shape.base
        shape = shape.base
        sizes = parameter_sizes(shape)
        if self._weights.sizes != sizes:
            odd = min(name for name, _ in self._weights.sizes.items() ^ sizes.items())
            raise UserError(f"{run}: the weights do not match the run's model at {odd}; they were modified")
        packs = dtype in FORMATS.values()
        wide = DTYPES["bf16" if packs else dtype]
        self._config = model_to_hf_config(shape) | {"dtype": str(wide).removeprefix("torch.")}
        self._tensors = [
            Planned(tensor.name, tensor.size, wide, partial(tensor.make, self._weights.read))
            for tensor in written_hf_tensors(shape, self._weights.sizes)
        ]
        if packs:
            require_packable(shape, dtype)
            self._config["quantization_config"] = quantization_config(dtype)
            chosen = {span.tensor for name, size in sizes.items() for span in _projection(shape, name, size)}
            self._tensors = list(in_codes(self._tensors, chosen, dtype))
        self._tensors += self._preferences()
        self.bytes = sum(tensor.bytes for tensor in self._tensors)

    def _preferences(self) -> list[Planned]:
        """Those of the routers, layer by layer, in fp32 whatever the weights' format: small steps move them."""
        sizes = preference_sizes(self._shape)
        if not sizes:
            return []
        rows_LN = self._weights.preferences()[-len(sizes) :]
        by_name = dict(zip(sizes, rows_LN, strict=True))
        return [Planned.of(tensor.name, by_name[tensor.parts[0][0]]) for tensor in hf_tensors(self._shape, sizes)]

    def write(self, folder: Path, report: Report = lambda done: None, shard_bytes: int = SHARD_BYTES) -> Exported:
        """Write the folder atomically; report(bytes) is called as it progresses."""
        shards = _cut(self._tensors, shard_bytes)
        with new_folder(folder, self.bytes) as draft:
            names = _names(len(shards))
            for name, tensors in zip(names, shards, strict=True):
                write_safetensors(draft / name, tensors, {"format": "pt"}, report)
            if len(shards) > 1:
                weight_map = {t.name: name for name, tensors in zip(names, shards, strict=True) for t in tensors}
                _write_json(draft / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})
            _write_json(draft / "config.json", self._config | read_token_ids(self._run))
            write_companions(self._run, draft, self._shape)
        return Exported(self._weights.step, self._config["model_type"], len(shards), self.bytes)


def _weights(run: Path, shape: Model, seed: int, checkpoint: Checkpoint | None) -> StoredWeights:
    """A run's weights, with what they were trained next to."""
    if not shape.freezes:
        return StoredWeights(run, checkpoint)
    return MergedWeights(run, shape, seed, checkpoint)


def _projection(shape: Model, name: str, size: tuple[int, ...]) -> list[Span]:
    """Where a projection's matrix is in a folder; nothing for other parameters."""
    return spans_of(shape, name, size) if is_projection(shape, name) else []


def _cut(tensors: list[Planned], shard_bytes: int) -> list[list[Planned]]:
    """The tensors in their order, as many to a shard as fit."""
    shards: list[list[Planned]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.bytes for each in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
