"""Hugging Face's config.json of every supported family, to and from the fields of [model]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job.hf_experts import expert_family, experts_config, experts_fields
from meshwright.job.hf_known import EXPERT_FAMILIES, FAMILIES, require_family, require_known_fields
from meshwright.job.hf_latent import latent_config, latent_fields
from meshwright.job.hf_llava import LLAVA, llava_config, llava_fields
from meshwright.job.hf_rope import rope_config, rope_fields
from meshwright.job.hf_values import expect, given, needed, shown, switch
from meshwright.job.model import Model
from meshwright.job.presets import weights_named
from meshwright.job.reading import json_table, read_settings_text

_THETA = {"mixtral": 1e6, "gpt_oss": 150000.0}
_EPS = {"mixtral": 1e-5, "olmoe": 1e-5, "gpt_oss": 1e-5}
_HEAD_DIM = {"qwen3": 128, "gpt_oss": 64}
"""What transformers takes for a field that is not given, if not 10,000, 1e-6 and the width over the heads."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


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
        report = f"{where} = {shown(problem['input'])}: {problem['msg']}" if where else problem["msg"]
        raise UserError(f"{name} is not a valid model ({report}); download it from the model's page") from None


def model_from_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] fields of a Hugging Face config.json; its dropout rates are ignored, as ours are off by default.

    Whatever Meshwright cannot compute is rejected: another family by its model_type, the rest by the field's name.
    """
    require_family(config)
    if config["model_type"] != LLAVA:
        require_known_fields(config)
    try:
        return _fields(config)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        # a string where a number belongs, a number where a list belongs
        raise UserError(f"config.json is not a valid model ({error}); download it from the model's page") from None


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    if family == LLAVA:
        return llava_fields(config, model_from_hf_config)
    if family == "gpt2":
        return _from_gpt2(config)
    expect(config, "hidden_act", ("silu",), "silu")
    width, heads = needed(config, "hidden_size"), needed(config, "num_attention_heads")
    bias = _biases(config)
    fields: dict[str, Any] = {
        "vocab_size": needed(config, "vocab_size"),
        "width": width,
        "layers": needed(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": given(config, "num_key_value_heads", heads),
        "head_dim": given(config, "head_dim", _HEAD_DIM.get(family, width // heads)),
        "ffn_width": needed(config, "intermediate_size"),
        "max_sequence_length": needed(config, "max_position_embeddings"),
        "norm_eps": given(config, "rms_norm_eps", _EPS.get(family, 1e-6)),
        "qkv_bias": bias or family == "qwen2",
        "linear_bias": bias,
        "qk_norm": family in ("qwen3", "qwen3_moe", "olmoe"),
        "tied": switch(config, "tie_word_embeddings", False),
    }
    fields |= _window(config) | rope_fields(config, _THETA.get(family, 10000.0))
    if family in EXPERT_FAMILIES:
        fields["experts"] = experts_fields(config)
    if family == "olmoe":
        fields["qk_norm_over"] = "width"
    if family == "gpt_oss":
        fields["sinks"] = True
    if family.startswith("deepseek"):
        fields |= latent_fields(config)
    return fields


def model_to_hf_config(shape: Model) -> dict[str, Any]:
    """A config.json that transformers builds the same model from; a shape that fits no family is rejected."""
    if shape.vision is not None:
        return llava_config(shape, shape.vision, model_to_hf_config(shape.decoder))
    if shape.audio is not None:
        raise UserError(
            "model.audio matches no Hugging Face family; export a model without it, or use the run's own checkpoints"
        )
    family = hf_family(shape)
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
        config = {
            "architectures": [f"{''.join(word.capitalize() for word in family.split('_'))}ForCausalLM"],
            "hidden_size": shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.ffn_width,
            "max_position_embeddings": shape.max_sequence_length,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            **rope_config(shape),
        }
    if family == "llama":
        config |= {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}
    if family in ("mistral", "mixtral", "qwen3_moe", "gpt_oss"):
        config["sliding_window"] = shape.sliding_window
    if family == "qwen3_moe":
        config["use_sliding_window"] = shape.sliding_window is not None
    if family == "gpt_oss":
        config["layer_types"] = [_SLIDING if shape.window(layer) else _FULL for layer in range(shape.layers)]
    if shape.experts is not None:
        config |= experts_config(family, shape.experts)
    if shape.latent is not None:
        config |= latent_config(shape, shape.latent)
    if family == "deepseek_v3":
        config["num_nextn_predict_layers"] = shape.extra_tokens
    return config | {"model_type": family, "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied}


def hf_family(shape: Model) -> str:
    """The Hugging Face model_type whose architecture this is; a shape that fits no family is rejected."""
    family = _dense_family(shape) if shape.experts is None else expert_family(shape, shape.experts)
    if family is not None:
        return family
    if shape.experts is not None:
        raise UserError(
            "model.experts with its scores, weights, biases and attention match no Hugging Face family; choose those "
            f"of {', '.join(EXPERT_FAMILIES[:-1])} or {EXPERT_FAMILIES[-1]}"
        )
    dense = [family for family in FAMILIES if family not in (*EXPERT_FAMILIES, LLAVA)]
    raise UserError(
        f"model.norm = {shape.norm}, activation = {shape.activation}, positions = {shape.positions} with its biases, "
        f"windows and head norms match no Hugging Face family; choose those of {', '.join(dense[:-1])} or {dense[-1]}"
    )


def _dense_family(shape: Model) -> str | None:
    kind = (shape.norm, shape.activation, shape.positions)
    biases, heads_fill_width = (shape.qkv_bias, shape.linear_bias), shape.heads * shape.head_dim == shape.width
    window, plain_heads = shape.sliding_window is not None, shape.kv_heads == shape.heads and heads_fill_width
    alternate = window and shape.window_layers != "all"
    if shape.sinks or shape.latent is not None or alternate or (shape.qk_norm and shape.qk_norm_over != "heads"):
        return None
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
    return None


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    expect(config, "scale_attn_weights", (True,), True)
    expect(config, "scale_attn_by_inverse_layer_idx", (False,), False)
    expect(config, "add_cross_attention", (False,), False)
    width = needed(config, "n_embd")
    return {
        "vocab_size": needed(config, "vocab_size"),
        "width": width,
        "layers": needed(config, "n_layer"),
        "heads": needed(config, "n_head"),
        "ffn_width": given(config, "n_inner", 4 * width),
        "max_sequence_length": needed(config, "n_positions"),
        "norm": "layernorm",
        "norm_eps": given(config, "layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "positions": "learned",
        "qkv_bias": True,
        "linear_bias": True,
        "tied": switch(config, "tie_word_embeddings", True),
    }


def _biases(config: Mapping[str, Any]) -> bool:
    """Whether all projections have biases; transformers' attention_bias covers q, k, v and o, mlp_bias the rest."""
    if config["model_type"] == "gpt_oss":  # whose routers and experts always have them
        expect(config, "attention_bias", (True,), True)
        return True
    attention, feedforward = switch(config, "attention_bias", False), switch(config, "mlp_bias", False)
    if attention != feedforward:
        raise UserError(
            f"config.json has attention_bias = {attention} but mlp_bias = {feedforward}; both must be the same"
        )
    return attention


def _window(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window and which layers have it."""
    family, layers = config["model_type"], needed(config, "num_hidden_layers")
    window = config.get("sliding_window", {"mistral": 4096, "gpt_oss": 128}.get(family))
    if window is not None and family in ("llama", "olmoe", "deepseek_v2", "deepseek_v3"):
        raise UserError(
            f"config.json has sliding_window = {window} but {family} models have none; use model_type mistral if "
            "its layers use a window, null if not"
        )
    sliding = _sliding_layers(config, layers, window)
    if sliding in (0, layers):
        return {"sliding_window": window if sliding else None}
    if sliding == "alternate":
        return {"sliding_window": window, "window_layers": "alternate"}
    raise UserError(
        f"config.json has layer_types with sliding attention in {sliding} of {layers} layers; use a model where all "
        "layers, none or every second from the first use a window"
    )


def _sliding_layers(config: Mapping[str, Any], layers: int, window: Any) -> int | str:
    """How many layers have the window, or "alternate"; transformers lets Qwen mix layers with and without."""
    family = config["model_type"]
    if config.get("layer_types") is not None:
        kinds = list(config["layer_types"])
        if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
            raise UserError(
                f"config.json has layer_types with {shown(unknown[0])}; use a model with only full attention"
            )
        if len(kinds) != layers:
            raise UserError(
                f"config.json has {len(kinds)} layer_types for {layers} layers; download it from the model's page"
            )
        alternate = layers > 1 and kinds == [_FULL if layer % 2 else _SLIDING for layer in range(layers)]
        return "alternate" if alternate else kinds.count(_SLIDING)
    if window is None:
        return 0
    if family.startswith("qwen"):
        if not window or not switch(config, "use_sliding_window", False):
            return 0
        first: int = 0 if family == "qwen3_moe" else given(config, "max_window_layers", 28)
        return min(layers, max(0, layers - first))
    return "alternate" if family == "gpt_oss" and layers > 1 else layers
