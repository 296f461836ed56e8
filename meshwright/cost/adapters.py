"""What adapters change in a block's cost: frozen weights need no gradients, and what only these needed is not saved.

The weights of experts have no adapters; of what they save nothing is left out, so that a mixture keeps at most this,
as does the first block where some of the projections of its input have no adapter.
"""

from dataclasses import replace

from meshwright.cost.cost import Cost
from meshwright.cost.parameters import block_products, block_tensors, projection_sizes
from meshwright.job import Model
from meshwright.job.adapter import adapted

_FLAG = 1
"""Bytes of an entry of a dropout mask."""
_INPUTS = {
    "attention.input": ("attention.q", "attention.k", "attention.v"),
    "ffn.input": ("ffn.gate", "ffn.up"),
    "ffn.product": ("ffn.down",),
    "shared.input": ("shared.gate", "shared.up"),
    "shared.product": ("shared.down",),
}
"""Saved tensors that only the weights' gradients need, by the projections whose input they are."""
_LATENT = {
    "attention.input": ("attention.q_down", "attention.kv_down", "attention.k_rope"),
    "attention.q_low": ("attention.q",),
    "attention.kv_low": ("attention.kv",),
    "attention.values": ("attention.o",),
}


def with_adapters(whole: Cost, shape: Model, tokens: int, number_bytes: int, layer: int) -> Cost:
    """A block's cost with the shape's adapters, from that of the block without any; nothing is recomputed."""
    adapter = shape.adapter
    assert adapter is not None
    names = [f"{group}.{name}" for group, name in adapted(shape, layer)]
    sizes = projection_sizes(shape)
    saved = {key: size for key, size in whole.saved_bytes.items() if _needed(shape, key, names)}
    products = 0
    for name in names:
        outputs, inputs = sizes[name]
        products += adapter.rank * (inputs + outputs)
        saved[f"{name}.low"] = tokens * adapter.rank * number_bytes
        if adapter.dropout > 0.0:
            saved[f"{name}.dropped"] = tokens * inputs * (number_bytes + _FLAG)
        if adapter.dora:
            saved[f"{name}.unscaled"] = (tokens + 2) * outputs * number_bytes
    own = sum(tensor.elements for tensor in block_tensors(shape, layer).values() if tensor.trained)
    weights = 2 * tokens * block_products(shape.base, layer)
    return Cost(
        whole.parameters + own,
        whole.forward_flops + adapter_flops(shape, tokens, layer),
        whole.backward_flops - weights + 4 * tokens * products,
        saved,
    )


def adapter_flops(shape: Model, tokens: int, layer: int) -> int:
    """What a block's adapters compute in the forward; DoRA's lengths of rows need B · A once."""
    adapter, sizes, total = shape.adapter, projection_sizes(shape), 0
    assert adapter is not None
    for group, name in adapted(shape, layer):
        outputs, inputs = sizes[f"{group}.{name}"]
        total += 2 * adapter.rank * (tokens * (inputs + outputs) + (inputs * outputs if adapter.dora else 0))
    return total


def needs_last(shape: Model) -> bool:
    """Whether a recomputation needs the result of a block's last projection: dropout follows, or DoRA scales it."""
    adapter = shape.adapter
    return shape.dropout > 0.0 or (adapter is not None and adapter.dora and adapter.adapts("ffn", "down"))


def at_the_start(block: Cost, shape: Model, tokens: int) -> Cost:
    """The first block's: nothing before it is trained, so that its input needs no gradient."""
    assert shape.adapter is not None
    sizes, names = projection_sizes(shape), {f"{group}.{name}" for group, name in adapted(shape, 0)}
    spared = 0
    saved = {key: size for key, size in block.saved_bytes.items() if not key.startswith("attention_norm.")}
    for name in _first(shape):
        outputs, inputs = sizes[name]
        spared += 2 * tokens * inputs * (outputs + (shape.adapter.rank if name in names else 0))
        if (dropped := f"{name}.dropped") in saved:
            saved[dropped] -= tokens * inputs * _FLAG
    return replace(block, backward_flops=block.backward_flops - spared, saved_bytes=saved)


def _first(shape: Model) -> tuple[str, ...]:
    """The projections of a block's input."""
    if shape.latent is None:
        return _INPUTS["attention.input"]
    down, rest = _LATENT["attention.input"][:1], _LATENT["attention.input"][1:]
    return (*(down if shape.latent.q_rank is not None else ("attention.q",)), *rest)


def _needed(shape: Model, key: str, names: list[str]) -> bool:
    """Whether a block with adapters keeps one of the tensors that a block without keeps."""
    assert shape.adapter is not None
    inputs = _INPUTS | (_LATENT if shape.latent is not None else {})
    inputs["attention.input"] = _first(shape)
    if shape.activation == "gelu":
        inputs["ffn.activated"] = ("ffn.down",)
    users = inputs.get(key)
    # With dropout every adapter keeps its own copy.
    return users is None or (shape.adapter.dropout == 0.0 and any(user in names for user in users))
