"""Rotary positions in Hugging Face's config.json, to and from rope_theta and rope_scaling of [model]."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.job.hf_values import given, shown, table
from meshwright.job.model import Model

_ORIGINAL = "original_max_position_embeddings"
_NEEDED = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")}


def rope_fields(config: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """rope_theta and rope_scaling, from rope_parameters or from the two separate keys of older configs."""
    new, old = table(config, "rope_parameters"), table(config, "rope_scaling")
    if new and old and _without_theta(new) != _without_theta(old):
        raise UserError("config.json has different rope_parameters and rope_scaling; keep the correct one")
    rope: dict[str, Any] = dict(new or old)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)  # transformers 4 wrote both
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise UserError(
            f"config.json has rope_type = {shown(kind)}, which Meshwright does not support; use default, llama3 or yarn"
        )
    if rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(
            "config.json has partial_rotary_factor other than 1; use a model with rotary positions over whole heads"
        )
    fields: dict[str, Any] = {"rope_theta": given(rope, "rope_theta", given(config, "rope_theta", default_theta))}
    _require_parameters(kind, _without_theta(rope))
    if kind != "default":
        optional = {key: rope[key] for key in _OPTIONAL.get(kind, ()) if rope.get(key) is not None}
        wanted = {key: rope[key] for key in _NEEDED[kind] if key != _ORIGINAL}
        fields["rope_scaling"] = wanted | optional | {"original_max_sequence_length": rope[_ORIGINAL]}
        if kind != "llama3":
            fields["rope_scaling"]["kind"] = kind
    return fields


def rope_config(shape: Model) -> dict[str, Any]:
    """The fields for a shape's rotary positions, also where transformers before version 5 looks."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if (scaling := shape.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, _ORIGINAL: scaling.original_max_sequence_length}
        rope |= {key: getattr(scaling, key) for key in _NEEDED[scaling.kind] if key != _ORIGINAL}
        optional = {key: getattr(scaling, key) for key in _OPTIONAL.get(scaling.kind, ())}
        rope |= {key: value for key, value in optional.items() if value or not key.startswith("mscale")}
    return {
        "rope_parameters": rope,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope_scaling is None else _without_theta(rope),
    }


def _require_parameters(kind: str, rope: Mapping[str, Any]) -> None:
    """Reject by name a parameter that is missing or that the kind does not have."""
    wanted, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    if odd := (rope.keys() - set(optional)) ^ set(wanted):
        name = min(odd)
        raise UserError(
            f"config.json {'has' if name in rope else 'lacks'} {name[:40]} among the parameters of rope_type "
            f"{kind!r}; it takes {', '.join(('rope_theta', *wanted, *optional))}"
        )


def _without_theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}
