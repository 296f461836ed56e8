"""Mixtures of experts in Hugging Face's config.json, to and from the [model.experts] table."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.job.experts import Experts
from meshwright.job.hf_values import expect, given, needed, shown, switch
from meshwright.job.model import Model

_ALPHA, _LIMIT = 1.702, 7.0


def experts_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of [model.experts]. Losses that balance experts are a choice of each training and are ignored."""
    family = config["model_type"]
    if family.startswith("deepseek"):
        return _deepseek_fields(config)
    fields: dict[str, Any] = {"count": _count(config), "top_k": needed(config, "num_experts_per_tok")}
    if family == "qwen3_moe":
        fields |= {"ffn_width": needed(config, "moe_intermediate_size"), "first_dense": _first_dense(config)}
    else:
        fields["ffn_width"] = needed(config, "intermediate_size")
    if family in ("qwen3_moe", "olmoe"):
        fields["normalised"] = switch(config, "norm_topk_prob", False)
    if family == "gpt_oss":
        expect(config, "swiglu_alpha", (_ALPHA,), _ALPHA)
        fields["swiglu_limit"] = given(config, "swiglu_limit", _LIMIT)
    return fields


def _deepseek_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    third = config["model_type"] == "deepseek_v3"
    width = needed(config, "moe_intermediate_size")
    expect(config, "moe_layer_freq", (1,), 1)
    expect(config, "scoring_func", ("sigmoid",) if third else ("softmax",), "sigmoid" if third else "softmax")
    if third:
        expect(config, "topk_method", ("noaux_tc",), "noaux_tc")
    else:
        expect(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
        expect(config, "norm_topk_prob", (False, None), False)  # transformers ignores it
    grouped = third or config.get("topk_method") == "group_limited_greedy"
    return {
        "count": needed(config, "n_routed_experts"),
        "top_k": needed(config, "num_experts_per_tok"),
        "ffn_width": width,
        "shared_width": width * given(config, "n_shared_experts", 0),
        "first_dense": given(config, "first_k_dense_replace", 0),
        "scores": "sigmoid" if third else "softmax",
        "normalised": third and switch(config, "norm_topk_prob", True),
        "scale": given(config, "routed_scaling_factor", 1.0),
        "groups": given(config, "n_group", 1) if grouped else 1,
        "groups_kept": given(config, "topk_group", 1) if grouped else 1,
    }


def experts_config(family: str, experts: Experts) -> dict[str, Any]:
    """The fields of a family's config.json for its experts."""
    config: dict[str, Any] = {"num_experts_per_tok": experts.top_k, "output_router_logits": False}
    if family.startswith("deepseek"):
        return config | _deepseek_config(family, experts)
    if family in ("mixtral", "gpt_oss"):
        config |= {"num_local_experts": experts.count, "intermediate_size": experts.ffn_width}
        gated = {"swiglu_alpha": _ALPHA, "swiglu_limit": experts.swiglu_limit, "attention_bias": True}
        return config | (gated if family == "gpt_oss" else {})
    config |= {"num_experts": experts.count, "norm_topk_prob": experts.normalised}
    if family == "olmoe":
        return config | {"intermediate_size": experts.ffn_width, "clip_qkv": None}
    return config | {
        "moe_intermediate_size": experts.ffn_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(experts.first_dense)),
    }


def _deepseek_config(family: str, experts: Experts) -> dict[str, Any]:
    config: dict[str, Any] = {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_width // experts.ffn_width,
        "moe_intermediate_size": experts.ffn_width,
        "first_k_dense_replace": experts.first_dense,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_kept,
    }
    if family == "deepseek_v3":
        return config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    limited = experts.groups_kept < experts.groups
    return config | {"topk_method": "group_limited_greedy" if limited else "greedy", "scoring_func": "softmax"}


def expert_family(shape: Model, experts: Experts) -> str | None:
    """The model_type whose routing and attention a shape with experts has; none if there is no such family."""
    if (shape.norm, shape.activation, shape.positions) != ("rmsnorm", "swiglu", "rope") or experts.force_balance:
        return None
    if shape.latent is not None:
        return _deepseek_family(shape, experts)
    softmax = experts.scores == "softmax" and not experts.balance_rate and experts.scale == 1.0
    if not softmax or experts.shared_width or experts.groups_kept < experts.groups:
        return None
    biases = (shape.qkv_bias, shape.linear_bias)
    if shape.sinks or experts.swiglu_limit is not None or any(biases):
        alike = all(biases) and shape.sinks and experts.swiglu_limit is not None and not shape.qk_norm
        return "gpt_oss" if alike and experts.normalised and not experts.first_dense else None
    if shape.window_layers != "all" and shape.sliding_window is not None:
        return None
    if not shape.qk_norm:
        return "mixtral" if experts.normalised and not experts.first_dense else None
    if shape.qk_norm_over == "heads":
        return "qwen3_moe"
    whole = shape.heads * shape.head_dim == shape.width and shape.sliding_window is None
    return "olmoe" if whole and not experts.first_dense else None


def _deepseek_family(shape: Model, experts: Experts) -> str | None:
    shared = experts.shared_width and experts.shared_width % experts.ffn_width == 0
    if not shared or experts.swiglu_limit is not None or shape.sliding_window is not None:
        return None
    if experts.scores == "sigmoid":
        return "deepseek_v3"
    return None if experts.normalised or experts.balance_rate else "deepseek_v2"


def _count(config: Mapping[str, Any]) -> int:
    """transformers calls it num_local_experts in some families and num_experts in others, and reads both."""
    names = [key for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if len({repr(config[key]) for key in names}) > 1:
        raise UserError(
            f"config.json has num_experts = {shown(config['num_experts'])} but num_local_experts = "
            f"{shown(config['num_local_experts'])}; keep the correct one"
        )
    return needed(config, names[0] if names else "num_experts")


def _first_dense(config: Mapping[str, Any]) -> int:
    """How many layers at the beginning have no experts; experts in other layers than all the rest are refused."""
    expect(config, "decoder_sparse_step", (1,), 1)
    dense = given(config, "mlp_only_layers", [])
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise UserError(
            f"config.json has mlp_only_layers = {shown(dense)}, and only the first layers may be without experts; use "
            "another model"
        )
    return len(dense)
