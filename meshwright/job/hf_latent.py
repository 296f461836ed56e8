"""DeepSeek's latent attention in Hugging Face's config.json, to and from head_dim and latent of [model]."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.job.hf_values import expect, given, needed, shown
from meshwright.job.model import Latent, Model


def latent_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of [model] for latent attention."""
    expect(config, "rope_interleave", (True, None), True)
    heads = needed(config, "num_attention_heads")
    if given(config, "num_key_value_heads", heads) != heads:
        raise UserError(
            f"config.json has num_key_value_heads = {shown(config['num_key_value_heads'])} for {heads} heads, and "
            "latent attention has as many; download it from the model's page"
        )
    rope_dim = needed(config, "qk_rope_head_dim")
    return {
        "kv_heads": heads,
        "head_dim": needed(config, "qk_nope_head_dim") + rope_dim,
        "latent": {
            "kv_rank": needed(config, "kv_lora_rank"),
            "q_rank": None if config.get("q_lora_rank", 1536) is None else needed(config, "q_lora_rank"),
            "rope_dim": rope_dim,
            "value_dim": needed(config, "v_head_dim"),
        },
    }


def latent_config(shape: Model, latent: Latent) -> dict[str, Any]:
    """The fields of a config.json for a shape's latent attention."""
    return {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": shape.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,  # so it is called there
        "attention_bias": False,
    }
