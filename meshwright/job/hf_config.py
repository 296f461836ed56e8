"""Hugging Face's config.json for Llama, Mistral, Qwen2, Qwen3 and GPT-2, to and from the fields of [model]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job.hf_known import require_family, require_known_fields
from meshwright.job.model import Model
from meshwright.job.presets import weights_named
from meshwright.job.reading import json_table, read_settings_text

_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not folder.is_dir():
        hub = weights_named(str(folder))
        name = "a name as org/name" if hub is None else f"its name, {hub}"
        raise UserError(f"{folder} is not a folder; download the model and give its folder, or {name}")
    if not path.exists():
        raise UserError(f"{folder} has no config.json; give the folder of a Hugging Face model")
    return json_table(path, read_settings_text(path, "download it again"), "download it again")


def model_of_folder(folder: Path) -> Model:
    """The shape of the model in a Hugging Face folder."""
    return model_of_config(read_hf_config(folder), str(folder / "config.json"))


def model_of_config(config: Mapping[str, Any], name: str = "config.json") -> Model:
    """The shape that a Hugging Face config describes; error messages call it `name`."""
    try:
        return Model.model_validate(model_from_hf_config(config), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        report = f"{where} = {_shown(problem['input'])}: {problem['msg']}" if where else problem["msg"]
        raise UserError(f"{name} is not a valid model ({report}); download it from the model's page") from None


def model_from_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] fields of a Hugging Face config.json; its dropout rates are ignored, as ours are off by default.

    Whatever Meshwright cannot compute is rejected: another family by its model_type, the rest by the field's name.
    """
    require_family(config)
    require_known_fields(config)
    try:
        return _fields(config)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        # a string where a number belongs, a number where a list belongs
        raise UserError(f"config.json is not a valid model ({error}); download it from the model's page") from None


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    if family == "gpt2":
        return _from_gpt2(config)
    _expect(config, "hidden_act", ("silu",), "silu")
    width, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    bias = _biases(config)
    fields: dict[str, Any] = {
        "vocab_size": _needed(config, "vocab_size"),
        "width": width,
        "layers": _needed(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _given(config, "num_key_value_heads", heads),
        "head_dim": _given(config, "head_dim", 128 if family == "qwen3" else width // heads),
        "ffn_width": _needed(config, "intermediate_size"),
        "max_sequence_length": _needed(config, "max_position_embeddings"),
        "norm_eps": _given(config, "rms_norm_eps", 1e-6),
        "qkv_bias": bias or family == "qwen2",
        "linear_bias": bias,
        "qk_norm": family == "qwen3",
        "sliding_window": _window(config),
        "tied": _switch(config, "tie_word_embeddings", False),
    }
    return fields | _rope(config)


def model_to_hf_config(shape: Model) -> dict[str, Any]:
    """A config.json that transformers builds the same model from; a shape that fits no family is rejected."""
    family = _family(shape)
    if family == "gpt2":
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.ffn_width,
            "n_positions": shape.max_sequence_length,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    else:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
        if shape.rope_scaling is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": shape.rope_scaling.factor,
                "low_freq_factor": shape.rope_scaling.low_freq_factor,
                "high_freq_factor": shape.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": shape.rope_scaling.original_max_sequence_length,
            }
        config = {
            "architectures": [f"{family.capitalize()}ForCausalLM"],
            "hidden_size": shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.ffn_width,
            "max_position_embeddings": shape.max_sequence_length,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": rope,
            # where transformers before version 5 looks
            "rope_theta": shape.rope_theta,
            "rope_scaling": None if shape.rope_scaling is None else _without_theta(rope),
        }
    if family == "llama":
        config |= {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}
    if family == "mistral":
        config["sliding_window"] = shape.sliding_window
    return config | {"model_type": family, "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied}


def _family(shape: Model) -> str:
    """The Hugging Face model_type whose architecture this is."""
    kind = (shape.norm, shape.activation, shape.positions)
    biases, heads_fill_width = (shape.qkv_bias, shape.linear_bias), shape.heads * shape.head_dim == shape.width
    window, plain_heads = shape.sliding_window is not None, shape.kv_heads == shape.heads and heads_fill_width
    if kind == ("layernorm", "gelu", "learned") and biases == (True, True) and plain_heads and not shape.qk_norm:
        if not window:
            return "gpt2"
    elif kind == ("rmsnorm", "swiglu", "rope"):
        if shape.qk_norm and biases == (False, False) and not window:
            return "qwen3"
        if not shape.qk_norm and biases == (True, False) and not window and heads_fill_width:
            return "qwen2"
        if not shape.qk_norm and biases == (False, False) and window:
            return "mistral"
        if not shape.qk_norm and biases in ((False, False), (True, True)) and not window:
            return "llama"
    raise UserError(
        f"model.norm = {shape.norm}, activation = {shape.activation}, positions = {shape.positions} with its biases, "
        "windows and head norms match no Hugging Face family; choose those of llama, mistral, qwen2, qwen3 or gpt2"
    )


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _expect(config, "scale_attn_weights", (True,), True)
    _expect(config, "scale_attn_by_inverse_layer_idx", (False,), False)
    _expect(config, "add_cross_attention", (False,), False)
    width = _needed(config, "n_embd")
    return {
        "vocab_size": _needed(config, "vocab_size"),
        "width": width,
        "layers": _needed(config, "n_layer"),
        "heads": _needed(config, "n_head"),
        "ffn_width": _given(config, "n_inner", 4 * width),
        "max_sequence_length": _needed(config, "n_positions"),
        "norm": "layernorm",
        "norm_eps": _given(config, "layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "positions": "learned",
        "qkv_bias": True,
        "linear_bias": True,
        "tied": _switch(config, "tie_word_embeddings", True),
    }


def _needed(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json has {key} = {_shown(value)} where a positive whole number is needed; download it from the "
            "model's page"
        )
    return value


def _given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field's value; null counts as not given, 0 does not."""
    value = config.get(key)
    return default if value is None else value


def _switch(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _given(config, key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.json has {key} = {_shown(value)} where true or false is needed; correct it")
    return value


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = _given(config, key, {})
    if not isinstance(value, dict):
        raise UserError(
            f"config.json has {key} = {_shown(value)} where a table is needed; download it from the model's page"
        )
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expect(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any) -> None:
    value = config.get(key, default)
    if value not in known:
        raise UserError(
            f"config.json has {key} = {_shown(value)}, which Meshwright does not support; it supports {known[0]!r}"
        )


def _biases(config: Mapping[str, Any]) -> bool:
    """Whether all projections have biases; transformers' attention_bias covers q, k, v and o, mlp_bias the rest."""
    attention, feedforward = _switch(config, "attention_bias", False), _switch(config, "mlp_bias", False)
    if attention != feedforward:
        raise UserError(
            f"config.json has attention_bias = {attention} but mlp_bias = {feedforward}; both must be the same"
        )
    return attention


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of every layer, or none; transformers lets Qwen mix layers with and without."""
    layers = _needed(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    sliding = layers if window is not None else 0
    if config["model_type"] == "llama" and sliding:
        raise UserError(
            f"config.json has sliding_window = {window} but llama models have none; use model_type mistral if "
            "its layers use a window, null if not"
        )
    if config["model_type"].startswith("qwen"):
        first_sliding = _given(config, "max_window_layers", 28)
        sliding = max(0, layers - first_sliding) if window and _switch(config, "use_sliding_window", False) else 0
    if config.get("layer_types") is not None:
        kinds = list(config["layer_types"])
        if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
            raise UserError(
                f"config.json has layer_types with {_shown(unknown[0])}; use a model with only full attention"
            )
        if len(kinds) != layers:
            raise UserError(
                f"config.json has {len(kinds)} layer_types for {layers} layers; download it from the model's page"
            )
        sliding = kinds.count("sliding_attention")
    if sliding not in (0, layers):
        raise UserError(
            f"config.json has layer_types with sliding attention in {sliding} of {layers} layers; use a model where "
            "all layers or none use a window"
        )
    return window if sliding else None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from rope_parameters or from the two separate keys of older configs."""
    new, old = _table(config, "rope_parameters"), _table(config, "rope_scaling")
    if new and old and _without_theta(new) != _without_theta(old):
        raise UserError("config.json has different rope_parameters and rope_scaling; keep the correct one")
    rope: dict[str, Any] = dict(new or old)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)  # transformers 4 wrote both
    if kind not in ("default", "llama3"):
        raise UserError(
            f"config.json has rope_type = {_shown(kind)}, which Meshwright does not support; use default or llama3"
        )
    if rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(
            "config.json has partial_rotary_factor other than 1; use a model with rotary positions over whole heads"
        )
    fields: dict[str, Any] = {"rope_theta": _given(rope, "rope_theta", _given(config, "rope_theta", 10000.0))}
    rope.pop("rope_theta", None)
    wanted = _SCALING if kind == "llama3" else ()
    if odd := rope.keys() ^ set(wanted):
        name = min(odd)
        raise UserError(
            f"config.json {'has' if name in rope else 'lacks'} {name[:40]} among the parameters of rope_type "
            f"{kind!r}; it takes {', '.join(('rope_theta', *wanted))}"
        )
    if kind == "llama3":
        fields["rope_scaling"] = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_sequence_length": rope["original_max_position_embeddings"],
        }
    return fields


def _without_theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}
