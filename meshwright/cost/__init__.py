"""What a model costs, from its shape alone: parameters, FLOPs, bytes kept for the backward; without torch."""

from meshwright.cost.cost import Cost, flops_per_token
from meshwright.cost.head import chunk_rows, in_whole_lines
from meshwright.cost.modules import (
    attention_cost,
    block_cost,
    decoder_cost,
    embedding_cost,
    feedforward_cost,
    head_cost,
    norm_cost,
)
from meshwright.cost.parameters import (
    active_parameters,
    block_parameters,
    block_products,
    block_tensors,
    layer_parameters,
    matmul_parameters,
    parameter_count,
    stage_parameters,
    tensor_count,
)
from meshwright.cost.recompute import (
    KEPT_OPERATIONS,
    MODES,
    PROJECTIONS,
    REPEATED,
    Mode,
    remade_bytes,
    segments_of,
)
from meshwright.cost.states import (
    ADAMW_MOVED_BYTES,
    MASTER_BYTES,
    SCALED_COLUMNS,
    best_interval_s,
    checkpoint_bytes,
    moments_of,
    state_bytes,
)

__all__ = [
    "ADAMW_MOVED_BYTES",
    "KEPT_OPERATIONS",
    "MASTER_BYTES",
    "MODES",
    "PROJECTIONS",
    "REPEATED",
    "SCALED_COLUMNS",
    "Cost",
    "Mode",
    "active_parameters",
    "attention_cost",
    "best_interval_s",
    "block_cost",
    "block_parameters",
    "block_products",
    "block_tensors",
    "checkpoint_bytes",
    "chunk_rows",
    "decoder_cost",
    "embedding_cost",
    "feedforward_cost",
    "flops_per_token",
    "head_cost",
    "in_whole_lines",
    "layer_parameters",
    "matmul_parameters",
    "moments_of",
    "norm_cost",
    "parameter_count",
    "remade_bytes",
    "segments_of",
    "stage_parameters",
    "state_bytes",
    "tensor_count",
]
