"""What a mixture of experts costs beside attention: its router, its experts' products, and what it keeps.

T tokens, R rows: a token once for each of its experts, N experts, D width, F an expert's inner width.
"""

from meshwright.cost.cost import Cost, saved
from meshwright.job import Model

_INDEX = 8
"""Bytes of an expert's number, or of a row's."""


def mixture_cost(shape: Model, batch: int, sequence: int, number_bytes: int) -> Cost:
    """Router, experts and the weighted sum over whole sequences, without the shared expert.

    The router computes in float32 or wider, from a copy of its input. Kept are the scores and the tokens' places, the
    rows with their projections, and the experts' results, which the weights' gradients need.
    """
    experts = shape.experts
    assert experts is not None
    wide = max(4, number_bytes)
    tokens = batch * sequence
    rows, inner = tokens * experts.top_k, experts.ffn_width
    per_expert = 3 * shape.width * inner + (2 * inner + shape.width if shape.linear_bias else 0)
    router = shape.width * experts.count
    product = 2 * (tokens * router + rows * 3 * shape.width * inner)
    parameters = router + experts.count * (per_expert + shape.linear_bias)
    places = saved(chosen=(rows, _INDEX), order=(rows, _INDEX), place=(rows, _INDEX))
    kept = saved(
        scores=(tokens * experts.count, wide),
        weights=(rows, wide),
        rows=(rows * shape.width, number_bytes),
        gate_up=(2 * rows * inner, number_bytes),
        activated=(rows * inner, number_bytes),
        product=(rows * inner, number_bytes),
        out=(rows * shape.width, number_bytes),
    )
    if experts.normalised:
        kept += saved(unnormalised=(rows, wide), sums=(tokens, wide))
    if number_bytes < wide:
        kept += saved(router=(router, wide))
    if not experts.shared_width or number_bytes < wide:  # else it is what the shared expert keeps
        kept += saved(input=(tokens * shape.width, wide))
    return Cost(parameters, product, 2 * product) + kept + places
