"""Turns a single-device model into this rank's shard."""

from meshwright.parallel.apply import build
from meshwright.parallel.compression.weights import CompressedWeights, Reduction
from meshwright.parallel.cuda_graph import steps_until_captured
from meshwright.parallel.engine import Engine, OneStage, Range
from meshwright.parallel.live_tensors import live_gradients, live_parameters
from meshwright.parallel.many_tensors import addresses_of, blocks_of, is_aligned
from meshwright.parallel.offload.host import Traffic, host_buffer, take_traffic
from meshwright.parallel.offload.weights import OffloadedWeights
from meshwright.parallel.own_table import failed_module, fails_without_table, table_error, uses_own_table
from meshwright.parallel.pipelining.pipedream import PipeDream
from meshwright.parallel.quantised import quantised_linears
from meshwright.parallel.shard_index import ShardIndex
from meshwright.parallel.weights import Weights, WholeWeights, one_pass_here
from meshwright.parallel.world import World, join_world

__all__ = [
    "CompressedWeights",
    "Engine",
    "OffloadedWeights",
    "OneStage",
    "PipeDream",
    "Range",
    "Reduction",
    "ShardIndex",
    "Traffic",
    "Weights",
    "WholeWeights",
    "World",
    "addresses_of",
    "blocks_of",
    "build",
    "failed_module",
    "fails_without_table",
    "host_buffer",
    "is_aligned",
    "join_world",
    "live_gradients",
    "live_parameters",
    "one_pass_here",
    "quantised_linears",
    "steps_until_captured",
    "table_error",
    "take_traffic",
    "uses_own_table",
]
