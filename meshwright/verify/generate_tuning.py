"""Fine-tuning of a drawn job: adapters next to frozen weights in any format, and answers as what is learned from."""

from math import gcd
from random import Random
from typing import Any

from meshwright.job.adapter import BLOCK

Table = dict[str, Any]
_TARGETS = (["all"], ["all"], ["all"], ["attention"], ["ffn"], ["q", "v"], ["o", "down"])
_LATENT_TARGETS = (["all"], ["all"], ["attention"], ["q", "kv"], ["kv_down", "o"])
_EXPERT_TARGETS = (["all"], ["attention"], ["q", "v"])


def add_adapter(rng: Random, table: Table) -> None:
    """Train adapters next to frozen weights, in place."""
    model, layout = table["model"], table["layout"]
    bases: tuple[str, ...] = ("compute", "nf4", "int8")
    if ("experts" in model or "latent" in model) and rng.random() < 0.95:  # otherwise it is refused
        bases = ("compute",)
    targets: tuple[list[str], ...] = _TARGETS
    if "latent" in model:
        targets = _LATENT_TARGETS
    elif "experts" in model:
        targets = _EXPERT_TARGETS
    model["adapter"] = {
        "rank": rng.choice((1, 3, 4, 5)),
        "alpha": rng.choice((2.0, 6.0, 8.0)),
        "dropout": rng.choice((0.0, 0.0, 0.1, 0.3)),
        "targets": rng.choice(targets),
        "rslora": rng.random() < 0.3,
        "dora": rng.random() < 0.3,
        "base": rng.choice(bases),
    }
    leave_pipedream(rng, layout)
    if model["adapter"]["base"] == "nf4":
        _fit_blocks(model, layout["tp"])


def leave_pipedream(rng: Random, layout: Table) -> None:
    """Run the pipeline in another order, mostly, where this one would be refused."""
    if layout.get("schedule") == "pipedream" and rng.random() < 0.9:
        layout["schedule"] = "1f1b"


def _fit_blocks(model: Table, tp: int) -> None:
    """Sizes of whole blocks on every rank."""
    unit = BLOCK * tp
    model["width"] = BLOCK
    model["ffn_width"] = unit * max(1, model["ffn_width"] // unit)
    model["head_dim"] = unit // gcd(model["heads"], unit)
    if model["head_dim"] % 2:
        model["head_dim"] *= 2  # rotated in pairs


def prefer(rng: Random, table: Table) -> None:
    """Learn from pairs of answers, in place."""
    table["data"]["format"] = "preferences"
    if rng.random() < 0.9:
        table["data"] |= {"packing": rng.choice(("best-fit", "best-fit", "none")), "mask_documents": True}
    loss = rng.choice(("dpo", "dpo", "ipo", "orpo"))
    leave_pipedream(rng, table["layout"])
    table["preference"] = {"loss": loss, "beta": rng.choice((0.1, 0.5))}
    if loss == "dpo" or rng.random() < 0.1:
        table["preference"]["label_smoothing"] = rng.choice((0.0, 0.2))
