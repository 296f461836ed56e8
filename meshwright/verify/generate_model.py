"""Models of drawn jobs: traits of a family, experts, latent attention, encoders, extra tokens, made to fit a layout."""

from math import gcd
from random import Random
from typing import Any

from meshwright.verify.generate_tuning import leave_pipedream

Table = dict[str, Any]

FAMILIES: dict[str, Table] = {
    "llama": {},
    "llama3": {"rope_theta": 500000.0},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-6},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "qkv_bias": True,
        "linear_bias": True,
    },
    "mistral": {"sliding_window": 7},
    "olmoe": {"qk_norm": True, "qk_norm_over": "width"},
    "gpt-oss": {
        "qkv_bias": True,
        "linear_bias": True,
        "sliding_window": 5,
        "window_layers": "alternate",
        "sinks": True,
    },
    "deepseek": {},
}
EXPERT_SHARE = {"olmoe": 0.9, "gpt-oss": 0.9, "deepseek": 0.8}
OTHERS_EXPERT_SHARE = 0.25
LATENT_SHARE = 0.08
"""Of the families besides deepseek that it does not exclude."""
TIED_SHARE = {"qwen2": 0.7, "qwen3": 0.7, "gpt2": 0.8}
YARN = {"kind": "yarn", "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9}
IMAGE_SIZE, PATCH = 8, 4
MELS, SECONDS = 5, 0.07
ITEM_SEQUENCES = 8
"""Sequences of a step in which some items of an encoder are in front of a label."""
_PARTS = (["encoder", "projector", "decoder"], ["projector", "decoder"], ["encoder", "projector"], ["projector"])


def draw_shape(rng: Random, family: str, layout: Table, stages: int) -> Table:
    """A decoder whose heads, widths and experts the layout divides; the layout gets what follows from them."""
    tp = layout["tp"]
    parts = tp * (layout["cp"] if layout.get("cp_method") == "ulysses" else 1)
    heads = parts * rng.choice([times for times in (1, 2, 3, 6) if times == 1 or parts * times <= 12])
    kv_heads = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    traits = dict(FAMILIES[family])
    if rng.random() < 0.2:  # a trait of another family
        traits |= dict([rng.choice([trait for other in FAMILIES.values() for trait in other.items()])])
    head_dim = rng.choice((2, 4, 4, 6, 8) if traits.get("positions") != "learned" else (3, 4, 5, 8))
    if family == "deepseek" or (_allows_latent(traits) and rng.random() < LATENT_SHARE):
        head_dim, kv_heads = max(4, head_dim), heads
        traits["latent"] = _latent(rng, head_dim)
        if rng.random() < 0.9:  # otherwise what it excludes is refused
            traits = {
                name: value for name, value in traits.items() if name == "latent" or _allows_latent({name: value})
            }
    as_wide = rng.random() < (0.3 if family == "qwen3" else 0.7)
    layers = stages + rng.randrange(3)
    if traits.get("positions") != "learned" and rng.random() < 0.25:
        kind = rng.choice(({}, YARN))
        length = rng.choice((8, 16))
        traits["rope_scaling"] = {"factor": rng.choice((2.0, 8.0)), "original_max_sequence_length": length, **kind}
    if kv_heads % tp and (rng.random() < 0.9 or traits.get("qk_norm_over") != "width"):
        if traits.get("qk_norm_over") == "width":  # it needs every key head once
            kv_heads = heads
        else:
            layout["kv_replicate"] = True
    elif rng.random() < 0.1:
        layout["kv_replicate"] = True
    if rng.random() < EXPERT_SHARE.get(family, OTHERS_EXPERT_SHARE):
        traits["experts"] = _experts(rng, family, layout, layers)
        if rng.random() < 0.9:  # otherwise gelu is refused
            traits.pop("activation", None)
        _draw_expert_parallelism(rng, layout, traits["experts"]["count"])
    if stages > 1 and rng.random() < 0.2:
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        layout["split"] = [stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
    return traits | {
        "vocab_size": rng.randint(41, 60),
        "width": heads * head_dim if as_wide else rng.randint(10, 40),
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_width": tp * max(1, rng.randint(18, 44) // tp),
        "tied": layout.get("schedule") != "pipedream" and rng.random() < TIED_SHARE.get(family, 0.3),
        "dropout": rng.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
    }


def _allows_latent(traits: Table) -> bool:
    without = ("qkv_bias", "linear_bias", "qk_norm", "sinks")
    return traits.get("positions") != "learned" and not any(traits.get(name) for name in without)


def _latent(rng: Random, head_dim: int) -> Table:
    return {
        "kv_rank": rng.randint(3, 9),
        "q_rank": rng.choice((None, 5, 7)),
        "rope_dim": rng.choice([size for size in (2, 4) if size <= head_dim]),
        "value_dim": rng.choice((head_dim, head_dim - 1, 2)),
    }


def _experts(rng: Random, family: str, layout: Table, layers: int) -> Table:
    """A few experts; some of them share a group, and some are in none of a token's groups."""
    groups = rng.choice((1, 1, 1, 2, 4))
    count = groups * rng.choice((1, 2, 2) if groups > 1 else (2, 3, 4, 4, 6, 8))
    groups_kept = rng.randint(1, groups)
    most = groups_kept * count // groups
    top_k = rng.choice([k for k in (1, 2, 2, 3, count) if k <= most] or [most])
    scores = rng.choice(("softmax", "sigmoid"))
    balanced = rng.choice(("loss", "loss", "rate", "both", "none"))
    stale = layout.get("schedule") == "pipedream"
    return {
        "count": count,
        "top_k": top_k,
        "ffn_width": rng.randint(5, 12),
        "shared_width": layout["tp"] * rng.randint(2, 8) if rng.random() < 0.35 else 0,
        "first_dense": rng.choice((0, 0, 1)) if layers > 1 else 0,
        "scores": scores,
        # A single weight that is divided by itself is 1, whatever the router computes.
        "normalised": rng.random() < 0.7 and top_k > 1,
        "scale": rng.choice((1.0, 1.0, 2.5)),
        "groups": groups,
        "groups_kept": groups_kept,
        "swiglu_limit": rng.choice((0.05, 0.3)) if rng.random() < (0.7 if family == "gpt-oss" else 0.1) else None,
        "balance_loss": rng.choice((0.01, 0.05)) if balanced in ("loss", "both") else 0.0,
        "z_loss": rng.choice((0.0, 0.01)),
        "balance_rate": rng.choice((0.01, 0.1)) if balanced in ("rate", "both") and not stale else 0.0,
        "capacity": rng.choice((0.5, 0.8)) if rng.random() < 0.2 else None,
    }


def _draw_expert_parallelism(rng: Random, layout: Table, count: int) -> None:
    """Distribute the experts over some of the ranks that may share them, mostly."""
    zero = layout["zero"]
    shares = zero != 0 and (zero is not None or layout["dp_shard"] * layout["cp"] > 1)
    ranks = gcd(count, layout["tp"] * (layout["dp_shard"] * layout["cp"] if shares else 1))
    degrees = [degree for degree in range(2, ranks + 1) if ranks % degree == 0]
    if degrees and rng.random() < 0.75:
        layout["ep"] = rng.choice(degrees)


def add_extra_tokens(rng: Random, table: Table) -> None:
    """Predict tokens after the next one too."""
    layout = table["layout"]
    splits = layout.get("schedule", "").startswith("zb-")
    table["model"]["extra_tokens"] = 1 if splits and rng.random() < 0.9 else rng.choice((1, 1, 1, 2))
    table["model"]["extra_tokens_weight"] = rng.choice((0.3, 1.0))
    leave_pipedream(rng, layout)


def add_encoder(rng: Random, table: Table) -> None:
    """An encoder that tp divides, with the decoder, which it then must divide too; and sequences enough for some items
    to be in front of a label."""
    layout, tp, batch = table["layout"], table["layout"]["tp"], table["batch"]
    times = -(-ITEM_SEQUENCES // batch["global_batch"])
    batch.update(micro_batch=times * batch["micro_batch"], global_batch=times * batch["global_batch"])
    table["model"]["width"] = tp * -(-table["model"]["width"] // tp)
    if rng.random() < 0.9:  # otherwise it is refused
        layout.pop("compress", None)
    leave_pipedream(rng, layout)
    heads = tp * rng.choice((1, 1, 2))
    # A later stage of a pipeline has only the decoder to train.
    weights = (4, 2, 1, 1) if layout["pp"] == 1 else (8, 4, 0, 1)
    encoder: Table = {
        "heads": heads,
        "ffn_width": tp * rng.randint(3, 12),
        "train": rng.choices(_PARTS, weights)[0],
    }
    if rng.random() < 0.4:
        table["model"]["audio"] = encoder | {
            "mels": MELS,
            "seconds": SECONDS,
            "width": heads * rng.choice((4, 6)),
            "layers": rng.choice((1, 2)),
            "windows": rng.choice((1, 2)),
        }
        return
    used, select = rng.choice((1, 2)), rng.choice((-1, -1, -2))
    table["model"]["vision"] = encoder | {
        "kind": rng.choice(("clip", "siglip")),
        "image_size": IMAGE_SIZE,
        "patch": PATCH,
        "width": max(4, heads * rng.choice((2, 4, 5))),  # a norm of two numbers is ±1, whatever they are
        "layers": used - select - 1,
        "select_layer": select,
        "images": rng.choice((1, 2)),
    }
