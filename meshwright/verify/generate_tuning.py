"""Fine-tuning of a drawn job: adapters next to frozen weights in any format, and answers as what is learned from."""

from math import gcd
from random import Random
from typing import Any

from meshwright.job.adapter import BLOCK

Table = dict[str, Any]
ADAPTED, PREFERRED = 0.25, 0.15
"""How often a job has adapters, and how often it learns from preferences."""
_TARGETS = (["all"], ["all"], ["all"], ["attention"], ["ffn"], ["q", "v"], ["o", "down"])


def tune(rng: Random, table: Table) -> None:
    """Make some jobs fine-tune, in place."""
    if rng.random() < ADAPTED:
        table["model"]["adapter"] = _adapter(rng)
        if table["model"]["adapter"]["base"] == "nf4":
            _fit_blocks(table["model"], table["layout"]["tp"])
    if rng.random() < PREFERRED:
        _prefer(rng, table)


def _adapter(rng: Random) -> Table:
    return {
        "rank": rng.choice((1, 3, 4, 5)),
        "alpha": rng.choice((2.0, 6.0, 8.0)),
        "dropout": rng.choice((0.0, 0.0, 0.1, 0.3)),
        "targets": rng.choice(_TARGETS),
        "rslora": rng.random() < 0.3,
        "dora": rng.random() < 0.3,
        "base": rng.choice(("compute", "compute", "nf4", "int8")),
    }


def _fit_blocks(model: Table, tp: int) -> None:
    """Sizes of whole blocks on every rank."""
    unit = BLOCK * tp
    model["width"] = BLOCK
    model["ffn_width"] = unit * max(1, model["ffn_width"] // unit)
    model["head_dim"] = unit // gcd(model["heads"], unit)
    if model["head_dim"] % 2:
        model["head_dim"] *= 2  # rotated in pairs


def _prefer(rng: Random, table: Table) -> None:
    table["data"]["format"] = "preferences"
    if rng.random() < 0.9:
        table["data"] |= {"packing": rng.choice(("best-fit", "best-fit", "none")), "mask_documents": True}
    loss = rng.choice(("dpo", "dpo", "ipo", "orpo"))
    table["preference"] = {"loss": loss, "beta": rng.choice((0.1, 0.5))}
    if loss == "dpo" or rng.random() < 0.1:
        table["preference"]["label_smoothing"] = rng.choice((0.0, 0.2))
