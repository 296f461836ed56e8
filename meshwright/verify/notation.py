"""A job in one line: its sizes, and every setting that is not the default, in the words of a job file."""

from typing import Any

from meshwright.job import Job

Table = dict[str, Any]

_DEFAULTS = Job().model_dump()
_DEFAULTS["data"]["workers"] = 0  # a check reads data in its own processes unless set otherwise
_UNSAID = {
    "layout": ("dp_replicate", "dp_shard", "cp", "tp", "pp", "split", "compress_rank", "compress_after"),
    "model": ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "max_sequence_length"),
    "optimizer": ("lr", "eps", "betas", "momentum", "weight_decay", "clip"),
    "data": ("sources", "prefetch"),
    "evaluation": ("every_steps", "batches", "sample_tokens"),
    "run": ("steps", "seed", "device", "on_bad_step"),
    "batch": ("sequence_length", "global_batch", "micro_batch"),
}
"""Shown differently, or only in the job file printed for a wrong result."""


def in_a_line(table: Table) -> str:
    """The table of a job as one compact line."""
    model, batch, layout = table["model"], table["batch"], table["layout"]
    degrees = [f"{axis} {layout[axis]}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if layout[axis] > 1]
    share = batch["micro_batch"] * layout["dp_replicate"] * layout["dp_shard"]
    sizes = f"{model['layers']} layers of {model['width']}, heads {model['heads']}/{model['kv_heads']}"
    steps = f"{batch['global_batch'] // share} × {batch['micro_batch']} × {batch['sequence_length']} tokens"
    said = [_said(name, value) for name, value in _changed(table)]
    return " · ".join((sizes, ", ".join(degrees) or "one rank", steps, ", ".join(said)))


def _changed(table: Table) -> list[tuple[str, Any]]:
    return [
        (section if name == "name" else name, value)
        for section in ("layout", "memory", "model", "data", "preference", "optimizer", "precision", "run")
        for name, value in table.get(section, {}).items()
        if name not in _UNSAID.get(section, ()) and value is not None and value != _DEFAULTS[section][name]
    ]


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, dict):
        return f"{name} {' '.join(_said(key, inner) for key, inner in value.items())}"
    if isinstance(value, list):
        return f"{name} {'+'.join(map(str, value))}"
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
