"""What a decoder costs, or a stage of it, from its shape: the sum of its parts."""

from collections.abc import Mapping

from meshwright.cost.adapters import at_the_start
from meshwright.cost.cost import Cost, saved
from meshwright.cost.encoder import encoder_cost
from meshwright.cost.modules import block_cost, head_cost, norm_cost, wide_bytes
from meshwright.cost.recompute import Mode
from meshwright.job import Model

_TOKEN, _FLAG = 8, 1
"""Bytes of a token's number or position, and of a dropout mask's entry."""


def decoder_cost(
    shape: Model,
    batch: int,
    sequence: int,
    number_bytes: int,
    recompute: Mapping[int, Mode] | None = None,
    *,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> Cost:
    """Cost of one training pass at default positions, with the shape's dropout: of the whole, or of a pipeline stage.

    A stage holds some layers, embedding and encoder if it is the first, norm and head if it is the last. `recompute`
    gives layers their modes; those not named keep everything.
    """
    own = range(shape.layers) if layers is None else layers
    adapters = shape.adapter is not None
    total = embedding_cost(shape, batch, sequence) if first else Cost()
    if first and shape.encoder is not None:
        total += encoder_cost(shape, shape.encoder, batch, number_bytes).within(shape.encoder.section)
    if own and shape.positions == "rope":
        table = (sequence * shape.rope_dim // 2, wide_bytes(number_bytes))
        total += saved(cos=table, sin=table)
    for layer in own:
        mode = (recompute or {}).get(layer, "none")
        joined = layer + 1 in own and (recompute or {}).get(layer + 1) == "joined"
        block = block_cost(shape, batch, sequence, number_bytes, mode, layer=layer, whole=joined)
        if adapters and layer == 0:
            block = at_the_start(block, shape, batch * sequence)
        total += block.within(f"layers.{layer}")
    if last:
        total += norm_cost(shape, batch, sequence, number_bytes).within("final_norm")
        total += head_cost(shape, batch, sequence, number_bytes).within("head")
        if first and shape.tied:
            total += Cost(parameters=-shape.vocab_size * shape.width)
    return total


def embedding_cost(shape: Model, batch: int, sequence: int) -> Cost:
    """The tables of words and, where they are learned, positions; what was looked up, and a dropout mask, are saved."""
    if shape.adapter is not None:  # nothing is computed for its gradient
        learned = shape.max_sequence_length if shape.positions == "learned" else 0
        return Cost((shape.vocab_size + learned) * shape.width)
    total = Cost(shape.vocab_size * shape.width) + saved(tokens=(batch * sequence, _TOKEN))
    if shape.dropout > 0.0:
        total += saved(embed_dropout=(batch * sequence * shape.width, _FLAG))
    if shape.positions == "learned":
        total += Cost(shape.max_sequence_length * shape.width) + saved(positions=(sequence, _TOKEN))
    return total
