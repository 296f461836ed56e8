"""What a model costs, from its shape alone: parameters, FLOPs, bytes kept for the backward; without torch."""

from meshwright.cost.adapters import needs_last
from meshwright.cost.cost import Cost, flops_per_token
from meshwright.cost.decoder import decoder_cost, embedding_cost
from meshwright.cost.encoder import encoder_cost
from meshwright.cost.frozen import Frozen, layer_frozen, made_bytes, stage_frozen
from meshwright.cost.head import chunk_rows, in_whole_lines
from meshwright.cost.modules import attention_cost, block_cost, feedforward_cost, head_cost, norm_cost
from meshwright.cost.parameters import (
    Elements,
    active_parameters,
    block_elements,
    block_products,
    block_tensors,
    encoder_shape,
    expert_sharers,
    layer_elements,
    matmul_parameters,
    parameter_count,
    sharers,
    stage_elements,
    tensor_count,
    trained_parameters,
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
    "Elements",
    "Frozen",
    "Mode",
    "active_parameters",
    "attention_cost",
    "best_interval_s",
    "block_cost",
    "block_elements",
    "block_products",
    "block_tensors",
    "checkpoint_bytes",
    "chunk_rows",
    "decoder_cost",
    "embedding_cost",
    "encoder_cost",
    "encoder_shape",
    "expert_sharers",
    "feedforward_cost",
    "flops_per_token",
    "head_cost",
    "in_whole_lines",
    "layer_elements",
    "layer_frozen",
    "made_bytes",
    "matmul_parameters",
    "moments_of",
    "needs_last",
    "norm_cost",
    "parameter_count",
    "remade_bytes",
    "segments_of",
    "sharers",
    "stage_elements",
    "stage_frozen",
    "state_bytes",
    "tensor_count",
    "trained_parameters",
]
