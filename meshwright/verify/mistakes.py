"""Mistakes people make in a job file: one field changed so that most jobs are refused, each by a different rule."""

from collections.abc import Callable
from random import Random
from typing import Any

Table = dict[str, Any]


def slip(rng: Random, table: Table) -> None:
    """Make one mistake; in some jobs it is valid."""
    rng.choice(_SLIPS)(table)


def _set(section: str, **fields: Any) -> Callable[[Table], None]:
    return lambda table: table[section].update(fields)


def _one_more(section: str, field: str) -> Callable[[Table], None]:
    def change(table: Table) -> None:
        table[section][field] += 1

    return change


_SLIPS: tuple[Callable[[Table], None], ...] = (
    _one_more("model", "heads"),
    _one_more("model", "kv_heads"),
    _one_more("model", "head_dim"),
    _one_more("model", "ffn_width"),
    _one_more("model", "max_sequence_length"),
    _one_more("batch", "sequence_length"),
    _one_more("batch", "global_batch"),
    _one_more("batch", "micro_batch"),
    _one_more("layout", "tp"),
    _one_more("layout", "cp"),
    _one_more("layout", "pp"),
    _set("model", layers=1),
    _set("layout", zero=0),
    _set("layout", zero=3),
    _set("layout", kv_replicate=False),
    _set("layout", virtual_stages=2),
    _set("layout", split=[1, 1]),
    _set("layout", cp_method="ulysses"),
    _set("layout", compress="topk", compress_ratio=1.0),
    _set("memory", recompute={"budget_gib": 1e-9}),
    _set("memory", recompute="selective"),
    _set("memory", offload=["optimizer"]),
    _set("precision", gradients="bf16"),
    _set("precision", compute="fp8"),
    _set("precision", compute="fp16"),
    _set("precision", optimizer_states="int8"),
    _set("schedule", warmup_steps=10),
    _set("run", on_bad_step="rewind"),
    _set("run", spike_score=10.0),
)
