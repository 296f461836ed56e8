"""What a model costs, from its shape alone: parameters, FLOPs, bytes kept for the backward; without torch."""

from meshwright.cost.cost import Cost, flops_per_token
from meshwright.cost.head import chunk_rows, in_whole_lines
from meshwright.cost.interval import best_interval_s
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
    block_parameters,
    block_products,
    block_tensors,
    layer_parameters,
    matmul_parameters,
    parameter_count,
    stage_parameters,
    tensor_count,
)
from meshwright.cost.recompute import KEPT_OPERATIONS, MODES, PROJECTIONS, Mode, remade_bytes

__all__ = [
    "KEPT_OPERATIONS",
    "MODES",
    "PROJECTIONS",
    "Cost",
    "Mode",
    "attention_cost",
    "best_interval_s",
    "block_cost",
    "block_parameters",
    "block_products",
    "block_tensors",
    "chunk_rows",
    "decoder_cost",
    "embedding_cost",
    "feedforward_cost",
    "flops_per_token",
    "head_cost",
    "in_whole_lines",
    "layer_parameters",
    "matmul_parameters",
    "norm_cost",
    "parameter_count",
    "remade_bytes",
    "stage_parameters",
    "tensor_count",
]
