"""Interprets the columns that a table of runs of mixtures of experts has beside those of all runs."""

import re
from typing import Any

from meshwright.plan.wording import Fields, Unpredicted


def mixture_of(row: Fields) -> dict[str, Any]:
    """The experts and the attention that a row describes, as fields of a model; nothing without experts."""
    if not row.get("n_experts"):
        return {}
    if not row["moe_d_ff"]:
        raise Unpredicted("does not say the experts' inner width")
    inner, shared = int(row["moe_d_ff"]), int(row["n_shared_experts"] or 0)
    experts = {
        "count": int(row["n_experts"]), "top_k": int(row["top_k"]), "ffn_width": inner, "shared_width": shared * inner,
        "first_dense": int(row["dense_layers"] or 0), "force_balance": "balance" in row["routing"],
    }  # fmt: skip
    model: dict[str, Any] = {"experts": experts} | _attention(row["attention"])
    # Every mixture of these years is a Llama but for its experts, and gpt-oss's biases.
    biases = bool(model.get("sinks"))
    model |= {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "qkv_bias": biases, "linear_bias": biases}
    return model | {"dropout": 0.0, "tied": False, "ffn_width": int(row["d_ff"] or inner)}


def _attention(text: str) -> dict[str, Any]:
    if found := re.search(r"MLA q_lora (\d+) kv_lora (\d+) nope (\d+) rope (\d+) v (\d+)", text):
        query, key, plain, rotated, value = map(int, found.groups())
        latent = {"q_rank": query, "kv_rank": key, "rope_dim": rotated, "value_dim": value}
        return {"latent": latent, "head_dim": plain + rotated}
    model: dict[str, Any] = {"qk_norm": "qk-norm" in text, "sinks": "sinks" in text}
    if found := re.search(r"head_dim (\d+)", text):
        model["head_dim"] = int(found[1])
    if found := re.search(r"window (\d+) every other layer", text):
        model |= {"sliding_window": int(found[1]), "window_layers": "alternate"}
    return model


def expert_parallel(row: Fields) -> int:
    """layout.ep of a row."""
    if row["ep"] or not row.get("n_experts"):
        return int(row["ep"] or 1)
    raise Unpredicted("does not say over how many ranks its experts are distributed")


def format_of(row: Fields, assumed: list[str]) -> str:
    """The compute format of a row: MXFP8 differs from fp8 in its scales, which are counted alike."""
    said = row["precision"] or "bf16"
    if said == "nvfp4":
        raise Unpredicted("computes in 4 bits, which is no format of ours")
    if said == "mxfp8":
        assumed.append("MXFP8 as fast as fp8")
    return "fp8" if said == "mxfp8" else said
