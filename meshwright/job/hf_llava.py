"""LLaVA's config.json to and from [model] and [model.vision]: a decoder's config and an encoder's inside of one."""

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.job.hf_known import IRRELEVANT
from meshwright.job.hf_values import expect, given, needed, shown, switch, table
from meshwright.job.model import Model
from meshwright.job.vision import Vision

LLAVA = "llava"
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The decoders it may have."""
_ENCODERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
_ACTIVATION = {"clip": "quick_gelu", "siglip": "gelu_pytorch_tanh"}
_EPS = {"clip": 1e-5, "siglip": 1e-6}
_STRATEGY = {"clip": "default", "siglip": "full"}
"""What LLaVA takes of the encoder's tokens: all but CLIP's class token."""
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
_SIGLIP = _CLIP | {"patch_size": 16}
"""What transformers takes for fields that are not given, and published configs leave some out."""
_READ = """
model_type text_config vision_config image_token_index image_token_id image_seq_length tie_word_embeddings
projector_hidden_act vision_feature_layer vision_feature_select_strategy multimodal_projector_bias ignore_index
vocab_size
"""
_READ_OF_ENCODERS = """
model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size
hidden_act layer_norm_eps vision_use_head projection_dim initializer_factor vocab_size
"""


def llava_fields(config: Mapping[str, Any], of_text: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The fields of [model] that a LLaVA config gives; `of_text` reads the config of its decoder."""
    _require_known(config, _READ, "")
    text = table(config, "text_config")
    family = text.get("model_type", "llama")
    if family not in TEXT_FAMILIES:
        raise UserError(
            f"config.json has text_config.model_type = {shown(family)}, which Meshwright does not support in a llava "
            f"model; use one of {', '.join(TEXT_FAMILIES)}"
        )
    defaults = _LLAMA if family == "llama" else {}
    tied = {"tie_word_embeddings": switch(config, "tie_word_embeddings", switch(text, "tie_word_embeddings", False))}
    own = {key: value for key, value in text.items() if value is not None}
    fields = of_text(defaults | own | tied | {"model_type": family})
    expect(config, "projector_hidden_act", ("gelu",), "gelu")
    expect(config, "multimodal_projector_bias", (True,), True)
    vision = _encoder_fields(table(config, "vision_config"))
    expect(config, "vision_feature_select_strategy", (_STRATEGY[vision["kind"]],), "default")
    vision["select_layer"] = given(config, "vision_feature_layer", -2)
    if not isinstance(vision["select_layer"], int) or vision["select_layer"] >= 0:
        raise UserError(
            f"config.json has vision_feature_layer = {shown(vision['select_layer'])}; only one layer, counted from the "
            "end (-1, -2, …), is supported"
        )
    vision["image_token"] = given(config, "image_token_index", given(config, "image_token_id", 32000))
    return fields | {"vision": vision}


def _encoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = _ENCODERS.get(str(config.get("model_type", "clip_vision_model")))
    if kind is None:
        raise UserError(
            f"config.json has vision_config.model_type = {shown(config.get('model_type'))}, which Meshwright does not "
            f"support; use one of {', '.join(_ENCODERS)}"
        )
    _require_known(config, _READ_OF_ENCODERS, "vision_config.")
    config = (_CLIP if kind == "clip" else _SIGLIP) | {key: value for key, value in config.items() if value is not None}
    expect(config, "num_channels", (3,), 3)
    expect(config, "hidden_act", (_ACTIVATION[kind],), _ACTIVATION[kind])
    if kind == "siglip" and switch(config, "vision_use_head", True):
        raise UserError(
            "config.json has vision_config.vision_use_head = true, an attention pooling that llava does not use; set "
            "it to false and leave the tensors of vision_tower.head out"
        )
    return {
        "kind": kind,
        "image_size": needed(config, "image_size"),
        "patch": needed(config, "patch_size"),
        "width": needed(config, "hidden_size"),
        "layers": needed(config, "num_hidden_layers"),
        "heads": needed(config, "num_attention_heads"),
        "ffn_width": needed(config, "intermediate_size"),
        "norm_eps": given(config, "layer_norm_eps", _EPS[kind]),
    }


def llava_config(shape: Model, vision: Vision, text: dict[str, Any]) -> dict[str, Any]:
    """A config.json that transformers builds the same model from, given its decoder's."""
    if text["model_type"] not in TEXT_FAMILIES:
        raise UserError(
            f"model.vision with a decoder like {text['model_type']} matches no Hugging Face family; choose one of "
            f"{', '.join(TEXT_FAMILIES)}"
        )
    if vision.image_token is None:
        raise UserError("model.vision.image_token is needed to write a llava config; set it to the token of pictures")
    encoder = next(theirs for theirs, kind in _ENCODERS.items() if kind == vision.kind)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": LLAVA,
        "image_token_index": vision.image_token,
        "image_seq_length": vision.tokens,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": vision.select_layer,
        "vision_feature_select_strategy": _STRATEGY[vision.kind],
        "tie_word_embeddings": shape.tied,
        "text_config": text,
        "vision_config": {
            "model_type": encoder,
            "hidden_size": vision.width,
            "intermediate_size": vision.ffn_width,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "num_channels": 3,
            "image_size": vision.image_size,
            "patch_size": vision.patch,
            "hidden_act": _ACTIVATION[vision.kind],
            "layer_norm_eps": vision.norm_eps,
        }
        | ({"vision_use_head": False} if vision.kind == "siglip" else {}),
    }


def _require_known(config: Mapping[str, Any], known: str, where: str) -> None:
    """Reject by name a field that might change the model; one that is null, false, 0 or empty enables nothing."""
    for key, value in config.items():
        if value and key not in IRRELEVANT | set(known.split()):
            raise UserError(
                f"config.json has {where}{key} = {shown(value)}, which Meshwright does not support; use another model, "
                "or remove it if the model works the same without it"
            )
