"""What a layout may be and what each of its ranks holds, by arithmetic alone, without torch."""

from meshwright.layout.activations import (
    encoder_bytes,
    holdings_of_rank,
    kv_copies,
    kv_heads_of,
    saved_by_name,
    stages_of_rank,
)
from meshwright.layout.auto import (
    AUTO,
    THE_CPU,
    Device,
    auto_choices,
    cluster_device,
    device_of_check,
    resolve_auto,
    resolve_for,
    with_values,
)
from meshwright.layout.derived import derived_values
from meshwright.layout.encoder import recomputes_encoder
from meshwright.layout.experts import expert_ranks, require_experts, require_router
from meshwright.layout.formats import FP8_MULTIPLE, gathers_fp8
from meshwright.layout.recompute import budget_span, recompute_modes, require_budget_counts, sure_budget
from meshwright.layout.rules import (
    axes,
    casts_from,
    gradient_format,
    is_asynchronous,
    most_tensor_parallel,
    padded_vocabulary,
    ranks_of,
    require_layout,
    table_of,
    updates_in_one_pass,
)
from meshwright.layout.stages import split_layers

__all__ = [
    "AUTO",
    "FP8_MULTIPLE",
    "THE_CPU",
    "Device",
    "auto_choices",
    "axes",
    "budget_span",
    "casts_from",
    "cluster_device",
    "derived_values",
    "device_of_check",
    "encoder_bytes",
    "expert_ranks",
    "gathers_fp8",
    "gradient_format",
    "holdings_of_rank",
    "is_asynchronous",
    "kv_copies",
    "kv_heads_of",
    "most_tensor_parallel",
    "padded_vocabulary",
    "ranks_of",
    "recompute_modes",
    "recomputes_encoder",
    "require_budget_counts",
    "require_experts",
    "require_layout",
    "require_router",
    "resolve_auto",
    "resolve_for",
    "saved_by_name",
    "split_layers",
    "stages_of_rank",
    "sure_budget",
    "table_of",
    "updates_in_one_pass",
    "with_values",
]
