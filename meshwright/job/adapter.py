"""The [model.adapter] section: low-rank matrices next to frozen projections (LoRA), which are all that is trained."""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from meshwright.errors import UserError
from meshwright.job.reading import json_table, read_settings_text
from meshwright.job.section import Section

if TYPE_CHECKING:
    from meshwright.job.model import Model

ALL = "all"
BLOCK, SCALES_PER_BLOCK = 64, 256
"""Of nf4: numbers of a row that share a scale, and scales that share one."""
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_FIELDS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
"""Ours and PEFT's names of what an adapter's folder determines."""
_PEFT_UNUSED = (
    *("modules_to_save", "layers_to_transform", "rank_pattern", "alpha_pattern", "trainable_token_indices"),
    *("target_parameters", "layer_replication", "lora_bias", "alora_invocation_tokens"),
)
"""PEFT's fields for adapters that are not all alike, or of something else than projections."""


class Adapter(Section):
    """LoRA (arXiv:2106.09685): the model's weights stay as they are, and each projection gets a product of two small
    matrices, B · A, which is trained."""

    rank: PositiveInt = Field(default=16, le=10**4)
    """Rows of A and columns of B."""
    alpha: PositiveFloat = Field(default=32.0, le=1e6)
    """B · A is multiplied by alpha / rank before it is added."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout of what A is applied to, keyed as model.dropout is."""
    targets: tuple[str, ...] = Field(default=(ALL,), min_length=1)
    """Projections by name (`q`, `ffn.up`) or by group (`attention`, `ffn`, `shared`); all of them by default, except
    those of experts."""
    rslora: bool = False
    """Multiply by alpha / √rank instead (arXiv:2312.03732)."""
    dora: bool = False
    """Train the length of every row of the sum too, apart from its direction (DoRA, arXiv:2402.09353)."""
    base: Literal["compute", "nf4", "int8"] = "compute"
    """The format of the projections that are not trained: that of precision.compute, or 4 bits (QLoRA,
    arXiv:2305.14314) or 8 bits as bitsandbytes has them, from which every product makes them anew."""
    init_from: str | None = None
    """A folder in PEFT's format to continue from; by default A is random and B zero."""

    @field_validator("targets", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        """A list from a file: the section around this one has been read, so strict validation knows of no file."""
        return tuple(value) if isinstance(value, list) else value

    @property
    def scale(self) -> float:
        """What B · A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, group: str, name: str) -> bool:
        """Whether a projection of a part of a block has an adapter."""
        return not {ALL, group, name, f"{group}.{name}"}.isdisjoint(self.targets)


def complete_adapter(table: dict[str, Any]) -> None:
    """Add what the folder of model.adapter.init_from determines to the table of a job, in place."""
    model = table.get("model")
    if not isinstance(model, dict):
        return
    adapter = model.get("adapter")
    if isinstance(adapter, dict) and isinstance(adapter.get("init_from"), str):
        model["adapter"] = _peft_table(adapter["init_from"], adapter) | adapter


def _peft_table(folder: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder in PEFT's format determines of [model.adapter]; given fields that contradict it are rejected."""
    path, field = Path(folder) / ADAPTER_CONFIG, f'model.adapter.init_from = "{folder}"'
    if not path.is_file() and not Path(folder).exists() and given.keys() >= _PEFT_FIELDS.keys():
        return {}  # a run that has its own adapters by now
    if not path.is_file():
        raise UserError(f"{field} has no {ADAPTER_CONFIG}; give a folder of PEFT, or of `checkpoint export --adapter`")
    config = json_table(path, read_settings_text(path, "save it again"), "save it again")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise UserError(f'{field}: only adapters with peft_type = "LORA" and bias = "none" are supported')
    for name in _PEFT_UNUSED:
        if config.get(name):
            raise UserError(f"{field}: {name} in {ADAPTER_CONFIG} is not supported; use an adapter without it")
    table = {ours: config[theirs] for ours, theirs in _PEFT_FIELDS.items() if theirs in config}
    for name, value in table.items():
        if name in given and given[name] != value:
            raise UserError(
                f"model.adapter.{name} = {given[name]} contradicts {field}, whose {ADAPTER_CONFIG} has {value}; leave "
                "it out"
            )
    if "alpha" in table and isinstance(table["alpha"], int):
        table["alpha"] = float(table["alpha"])
    return table


def adaptable(shape: "Model") -> Mapping[str, tuple[str, ...]]:
    """The projections that can have an adapter, by the part of a block they belong to."""
    latent, experts = shape.latent, shape.experts
    feedforward = ("gate", "up", "down") if shape.activation == "swiglu" else ("up", "down")
    attention: tuple[str, ...] = ("q", "k", "v", "o")
    if latent is not None:
        attention = (*(("q_down",) if latent.q_rank is not None else ()), "q", "kv_down", "kv", "k_rope", "o")
    groups = {"attention": attention}
    if experts is None or experts.first_dense:
        groups["ffn"] = feedforward
    if experts is not None and experts.shared_width:
        groups["shared"] = feedforward
    return groups


def adapted(shape: "Model", layer: int = -1) -> list[tuple[str, str]]:
    """The projections of a layer that have an adapter, as part and name; the last layer's by default."""
    if shape.adapter is None:
        return []
    without = "ffn" if shape.has_experts(layer % shape.layers) else "shared"
    pairs = [(group, name) for group, names in adaptable(shape).items() for name in names if group != without]
    return [pair for pair in pairs if shape.adapter.adapts(*pair)]


def is_quantised(shape: "Model", parameter: str) -> bool:
    """Whether a parameter of a model is stored in fewer bits than it is computed with: projections next to adapters."""
    return shape.adapter is not None and shape.adapter.base != "compute" and is_projection(shape, parameter)


def is_projection(shape: "Model", parameter: str) -> bool:
    """Whether a parameter is the matrix of a projection in a block, except those of experts."""
    *_, group, name, kind = ("", "", *parameter.split("."))
    return kind == "weight" and name in adaptable(shape).get(group, ())


def require_adapter(shape: "Model", adapter: Adapter) -> None:
    """Reject what an adapter cannot be added to, and targets that the model does not have."""
    if shape.file is not None:
        raise ValueError(
            f"model.adapter is for Meshwright's own decoder, but model.file = {shape.file} builds its own; leave one "
            "of them out"
        )
    if shape.extra_tokens:
        raise ValueError(
            f"model.adapter trains no blocks of model.extra_tokens = {shape.extra_tokens}; set model.extra_tokens = 0"
        )
    _require_base(shape, adapter)
    groups = adaptable(shape)
    known = {ALL, *groups} | {name for names in groups.values() for name in names}
    known |= {f"{group}.{name}" for group, names in groups.items() for name in names}
    for target in adapter.targets:
        if target not in known:
            there = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
            raise ValueError(
                f'model.adapter.targets has "{target}", which this model does not have; use {ALL} or some of {there}'
            )


def _require_base(shape: "Model", adapter: Adapter) -> None:
    """Reject what cannot be quantised."""
    field = f'model.adapter.base = "{adapter.base}"'
    if adapter.base == "compute":
        return
    if shape.experts is not None:
        raise ValueError(
            f"{field} is for projections, and most weights of a model with model.experts are those of its experts; set "
            'model.adapter.base = "compute"'
        )
    if shape.latent is not None:
        raise ValueError(f'{field} is not for models with model.latent; set model.adapter.base = "compute"')
    inputs = {shape.width, shape.ffn_width, shape.heads * shape.head_dim}
    odd = [size for size in sorted(inputs) if size % BLOCK]
    if adapter.base == "nf4" and odd:
        raise ValueError(
            f"{field} needs rows of whole blocks of {BLOCK} numbers, and this model has projections of {odd[0]} inputs;"
            ' set model.adapter.base = "int8"'
        )
