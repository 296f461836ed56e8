"""Models of a family's proportions in other sizes: between the sizes that were published, and beyond them."""

from collections.abc import Iterator
from math import ceil, gcd

from meshwright.job import Model

_STEP = 2 ** (1 / 16)
"""Sizes are about 4% apart."""
_SMALLEST, _LARGEST = 2.0**-12, 2.0**14
_HEADS = 8
"""Heads come in multiples of this, if the model's own do, so that tensor parallelism divides them."""
_ALIGNED = 256
_MOST_LAYERS, _MOST_WIDTH = 2000, 10**6


def grown(model: Model) -> Iterator[Model]:
    """The model at other numbers of parameters, from thousandths of its own to thousands of times as many."""
    size = _SMALLEST
    while size <= _LARGEST:
        if (other := _at(model, size)) is not None:
            yield other
        size *= _STEP


def grown_how(model: Model) -> str:
    """How `grown` scales, in words."""
    heads = "as many key heads as heads" if model.kv_heads == model.heads else f"{model.kv_heads} key heads"
    experts = model.experts
    inner = f"a feed-forward {model.ffn_width / model.width:.3g} times as wide"
    if experts is not None:
        inner = f"{experts.count} experts {experts.ffn_width / model.width:.3g} times as wide, {experts.top_k} a token"
    return (
        f"layers and width grow together, {model.width / model.layers:.3g} wide per layer; heads of {model.head_dim}, "
        f"{heads}, {inner}, {model.vocab_size:,} words"
    )


def _at(model: Model, size: float) -> Model | None:
    """The model with about `size` times the parameters of its blocks: heads in whole groups, then as many layers as
    give the number. None where that is no model."""
    shared = model.kv_heads < model.heads
    group = model.kv_heads if shared else gcd(_HEADS, model.heads)
    heads = max(group, round(model.heads * size ** (1 / 3) / group) * group)
    width = max(1, round(model.width * heads / model.heads))
    inner = _scaled(model.ffn_width, heads / model.heads)
    experts = model.experts
    if experts is not None:
        widths = {name: _scaled(getattr(experts, name), heads / model.heads) for name in ("ffn_width", "shared_width")}
        experts = experts.model_copy(update=widths)
    layers = round(model.layers * size * (model.heads / heads) ** 2)
    if experts is not None and layers <= experts.first_dense:
        return None
    if not 1 <= layers <= _MOST_LAYERS or width > _MOST_WIDTH:
        return None
    shape = {"heads": heads, "kv_heads": model.kv_heads if shared else heads, "width": width, "ffn_width": inner}
    return model.model_copy(update={**shape, "layers": layers, "experts": experts, "preset": None})


def _scaled(inner: int, times: float) -> int:
    return ceil(inner * times / _ALIGNED) * _ALIGNED
