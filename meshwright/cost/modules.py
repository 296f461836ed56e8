"""What the parts of a block and the head cost, from a shape; tests compare each with what autograd saves and a counter
measures.

`number_bytes` are those of one number of the compute format: 8, 4 or 2.
"""

from dataclasses import replace

from meshwright.cost.adapters import adapter_flops, needs_last, with_adapters
from meshwright.cost.cost import Cost, saved
from meshwright.cost.experts import mixture_cost
from meshwright.cost.recompute import Mode, under
from meshwright.job import Latent, Model

_FLAG = 1
"""Bytes of a dropout mask's entry."""


def block_cost(
    shape: Model,
    batch: int,
    sequence: int,
    number_bytes: int,
    recompute: Mode = "none",
    *,
    layer: int = -1,
    whole: bool = False,
) -> Cost:
    """The sum of the parts and the dropout masks; the norms' inputs are the residual stream at two points. Of a mixture
    the last layer's by default: the first ones may have no experts.

    With recomputation: what is kept instead, and a backward with the forward work it repeats: `whole` if another block
    is recomputed from its result.
    """
    sizes = (shape, batch, sequence, number_bytes)
    total = norm_cost(*sizes).within("attention_norm") + attention_cost(*sizes).within("attention")
    total += norm_cost(*sizes).within("ffn_norm")
    stream = batch * sequence * shape.width
    mixture = shape.has_experts(layer % shape.layers)
    if mixture and shape.experts is not None:
        total += mixture_cost(*sizes).within("moe")
        if shape.experts.shared_width:
            total += feedforward_cost(*sizes, shape.experts.shared_width).within("shared")
    else:
        total += feedforward_cost(*sizes).within("ffn")
    if shape.adapter is not None:
        total = with_adapters(total, shape, batch * sequence, number_bytes, layer)
    if shape.dropout > 0.0:
        total += saved(attention_dropout=(stream, _FLAG), ffn_dropout=(stream, _FLAG))
    last = linear_cost(batch * sequence, shape.ffn_width, shape.width, False)
    # The weights of a token's experts need the experts' results.
    spared = 0 if whole or mixture or needs_last(shape) else last.forward_flops
    projected = {} if spared or mixture else {"ffn.projected": stream * number_bytes}
    if mixture and shape.experts is not None:
        projected["moe.logits"] = batch * sequence * shape.experts.count * max(4, number_bytes)
        if shape.experts.shared_width:
            projected["shared.projected"] = stream * number_bytes
    if shape.latent is not None:
        projected |= _latent_projected(shape, shape.latent, batch * sequence * number_bytes)
    kept = under(recompute, total, stream * number_bytes, spared, projected)
    if recompute == "selective" and shape.adapter is not None:  # products with adapters are cheap, and repeated
        again = adapter_flops(shape, batch * sequence, layer)
        kept = replace(kept, backward_flops=kept.backward_flops + again)
    return kept


def _latent_projected(shape: Model, latent: Latent, each: int) -> dict[str, int]:
    """Of every token's keys and values selective recomputation keeps what they are made from."""
    up = shape.heads * (shape.head_dim - latent.rope_dim + latent.value_dim)
    sizes = {
        "kv": up,
        "kv_down": latent.kv_rank,
        "k_rope": latent.rope_dim,
        "q_down": latent.q_rank or 0,
        "k": 0,
        "v": 0,
    }
    return {f"attention.{name}": each * size for name, size in sizes.items()}


def attention_cost(shape: Model, batch: int, sequence: int, number_bytes: int) -> Cost:
    """Cost over whole sequences without documents; only the CPU kernel saves a mask, under a sliding window."""
    if shape.latent is not None:
        return _latent_cost(shape, shape.latent, batch, sequence, number_bytes)
    tokens, heads_width = batch * sequence, shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    total = linear_cost(tokens, heads_width, shape.width, shape.linear_bias)
    for width in (heads_width, kv_width, kv_width):
        total += linear_cost(tokens, shape.width, width, shape.qkv_bias)
    if shape.qk_norm:
        for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
            total += _rms_norm(tokens * heads, shape.head_dim, number_bytes).within(name)
    pairs_product = 2 * batch * sequence * sequence * heads_width
    total += Cost(0, 2 * pairs_product, 5 * pairs_product)
    if shape.sliding_window is not None and shape.sliding_window < sequence:
        total += saved(mask=(sequence * sequence, number_bytes))
    return total + saved(
        input=(tokens * shape.width, number_bytes),
        q=(tokens * heads_width, number_bytes),
        k=(tokens * kv_width, number_bytes),
        v=(tokens * kv_width, number_bytes),
        out=(tokens * heads_width, number_bytes),
        lse=(tokens * shape.heads, wide_bytes(number_bytes)),
    )


def _latent_cost(shape: Model, latent: Latent, batch: int, sequence: int, number_bytes: int) -> Cost:
    """Attention by small vectors: theirs before and after their norms are saved, and values as wide as keys."""
    tokens, heads = batch * sequence, shape.heads
    unrotated = shape.head_dim - latent.rope_dim
    total = linear_cost(tokens, shape.width, latent.kv_rank + latent.rope_dim, False)
    total += linear_cost(tokens, latent.kv_rank, heads * (unrotated + latent.value_dim), False)
    total += linear_cost(tokens, latent.q_rank or shape.width, heads * shape.head_dim, False)
    total += linear_cost(tokens, heads * latent.value_dim, shape.width, False)
    total += _rms_norm(tokens, latent.kv_rank, number_bytes).within("kv_down_norm")
    low = {"kv_low": (tokens * latent.kv_rank, number_bytes)}
    if latent.q_rank is not None:
        total += linear_cost(tokens, shape.width, latent.q_rank, False)
        total += _rms_norm(tokens, latent.q_rank, number_bytes).within("q_down_norm")
        low["q_low"] = (tokens * latent.q_rank, number_bytes)
    wide = (tokens * heads * shape.head_dim, number_bytes)
    pairs_product = 2 * batch * sequence * sequence * heads * shape.head_dim
    total += Cost(0, 2 * pairs_product, 5 * pairs_product)
    return total + saved(
        input=(tokens * shape.width, number_bytes),
        q=wide,
        k=wide,
        v=wide,
        out=wide,
        values=(tokens * heads * latent.value_dim, number_bytes),
        lse=(tokens * heads, wide_bytes(number_bytes)),
        **low,
    )


def feedforward_cost(shape: Model, batch: int, sequence: int, number_bytes: int, ffn_width: int | None = None) -> Cost:
    """The input, the projections' results, the activation and, when gated, the product are saved."""
    tokens, bias, width = batch * sequence, shape.linear_bias, ffn_width or shape.ffn_width
    inner = (tokens * width, number_bytes)
    total = linear_cost(tokens, shape.width, width, bias) + linear_cost(tokens, width, shape.width, bias)
    total += saved(input=(tokens * shape.width, number_bytes), up=inner, activated=inner)
    if shape.activation == "swiglu":
        total += linear_cost(tokens, shape.width, width, bias) + saved(gate=inner, product=inner)
    return total


def norm_cost(shape: Model, batch: int, sequence: int, number_bytes: int) -> Cost:
    """The norm before a block's halves and before the head: its input and one or two statistics a row are saved.

    LayerNorm's are in the input's format on a CPU, as said here; CUDA keeps them in float32.
    """
    rows = batch * sequence
    if shape.norm == "rmsnorm":
        return _rms_norm(rows, shape.width, number_bytes)
    row = (rows, number_bytes)
    return Cost(2 * shape.width) + saved(input=(rows * shape.width, number_bytes), mean=row, rstd=row)


def head_cost(shape: Model, batch: int, sequence: int, number_bytes: int) -> Cost:
    """Cost of training with labels: gradients are made in the forward pass and are all that is saved."""
    tokens, weights = batch * sequence, shape.vocab_size * shape.width
    if shape.adapter is not None:
        kept = saved(hidden_gradient=(tokens * shape.width, number_bytes))
        return Cost(weights, 2 * 2 * tokens * weights, 0) + kept
    kept = saved(hidden_gradient=(tokens * shape.width, number_bytes), weight_gradient=(weights, number_bytes))
    return Cost(weights, 3 * 2 * tokens * weights, 0) + kept


def linear_cost(tokens: int, inputs: int, outputs: int, bias: bool) -> Cost:
    """A projection's parameters and FLOPs; its input is named by whoever owns it, since projections share inputs."""
    product = 2 * tokens * inputs * outputs
    return Cost(inputs * outputs + (outputs if bias else 0), product, 2 * product)


def _rms_norm(rows: int, size: int, number_bytes: int) -> Cost:
    return Cost(size) + saved(input=(rows * size, number_bytes), rstd=(rows, wide_bytes(number_bytes)))


def wide_bytes(number_bytes: int) -> int:
    """Statistics and tables are made in float32, or in float64 where all is."""
    return 8 if number_bytes == 8 else 4
