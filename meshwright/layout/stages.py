"""Pipeline stages: which layers each one holds."""

from functools import lru_cache

from meshwright.cost import block_products
from meshwright.errors import UserError
from meshwright.job import Job, Model

BYTES_AS_FLOPS = 300
"""FLOPs a GPU could do while it moves one byte (H100 SXM: 989e12 FLOP/s over 3.35e12 B/s): weighs work that only moves
numbers against matrix products."""
LOSS_BYTES_PER_LOGIT = 20
"""Float32 logits are computed, shifted, exponentiated, scaled and read again: about five passes."""
EMBEDDING_BYTES_PER_ENTRY = 12
"""Forward reads and writes 16-bit entries, backward reads and adds 32-bit ones."""


def split_layers(job: Job, stages: int) -> list[range]:
    """The layers of each stage, as layout.split says or balanced by the cost of layers, embedding and head."""
    counts = job.layout.split or balanced_counts(job.model, job.batch.sequence_length, stages)
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def require_stages(job: Job, stages: int) -> None:
    """Refuse more stages than layers, and a split that does not match the layers and stages."""
    split, layers = job.layout.split, job.model.layers
    if stages > layers:
        held = stages // job.layout.pp
        each = f" with {held} stages a rank" if held > 1 else ""
        raise UserError(
            f"layout.pp = {job.layout.pp}{each} makes {stages} stages, more than model.layers = {layers}; lower "
            f"layout.pp{' or layout.virtual_stages' if held > 1 else ''}"
        )
    if split is None:
        return
    if len(split) != stages or sum(split) != layers or min(split) < 1:
        raise UserError(
            f"layout.split = {list(split)} must give each of {stages} stages at least one of model.layers = {layers} "
            f"layers, {layers} in all; set it to {list(balanced_counts(job.model, job.batch.sequence_length, stages))} "
            "or leave it out"
        )


@lru_cache(maxsize=64)
def balanced_counts(shape: Model, sequence: int, stages: int) -> tuple[int, ...]:
    """Layers per stage such that the most expensive stage is as cheap as possible, with at least one each."""
    if stages == 1:
        return (shape.layers,)
    layer, embedding, head = piece_costs(shape, sequence)
    inner = stages - 2
    most_first, most_inner, most_last = _most_layers(shape.layers, inner, (layer, embedding, head))
    ways = []
    for last in range(1, min(most_last, shape.layers - stages + 1) + 1):
        # The embedding only adds to the first stage: it never holds more than an even share of what the last leaves.
        even_share = -(-(shape.layers - last) // (stages - 1))
        for first in range(max(1, shape.layers - last - inner * most_inner), min(most_first, even_share) + 1):
            left = shape.layers - first - last
            if left < inner or (left and not inner):
                continue
            each, more = divmod(left, inner) if inner else (0, 0)
            ends = (first * layer + embedding, last * layer + head)
            high = max(*ends, (each + (more > 0)) * layer)
            squares = sum(end**2 for end in ends) + layer**2 * ((inner - more) * each**2 + more * (each + 1) ** 2)
            ways.append((high, squares, first, each, more, last))  # squares even out the stages below the highest
    _, _, first, each, more, last = min(ways)
    return (first, *[each] * (inner - more), *[each + 1] * more, last)


def _most_layers(layers: int, inner: int, costs: tuple[float, float, float]) -> tuple[int, int, int]:
    """Most layers of the first stage, of an inner one and of the last in the ways whose highest stage is cheapest.

    Without these limits, there are as many ways as the square of the layers.
    """
    layer, embedding, head = costs

    def within(cost: float) -> tuple[int, int, int]:
        return int((cost - embedding) / layer), int(cost / layer), int((cost - head) / layer)

    low = layer + max(embedding, head)
    high = low + layers * layer
    while high - low > layer / 1000:
        middle = (low + high) / 2
        first, each, last = within(middle)
        if first + inner * each + last >= layers:
            high = middle
        else:
            low = middle
    return within(high)


def piece_costs(shape: Model, sequence: int) -> tuple[float, float, float]:
    """What a layer, the embedding and the head with its loss cost per token and step, in FLOPs or the equivalent; extra
    tokens, each with a layer and another pass through the head, count as part of the head."""
    layer = 6.0 * block_products(shape) + 3.0 * sequence * shape.heads * (shape.head_dim + shape.value_dim)
    embedding = float(BYTES_AS_FLOPS * EMBEDDING_BYTES_PER_ENTRY * shape.width)
    head = shape.vocab_size * (6.0 * shape.width + BYTES_AS_FLOPS * LOSS_BYTES_PER_LOGIT)
    extra = shape.extra_tokens * (layer + 6.0 * 2 * shape.width**2 + head)
    return layer, embedding, head + extra
