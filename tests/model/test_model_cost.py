"""Stated saved bytes equal what autograd keeps, storage by storage, and stated FLOPs what a counter sees."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from model_shapes import preset
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.cost import Cost, attention_cost, block_cost, decoder_cost, feedforward_cost, head_cost, norm_cost
from meshwright.job.model import Model
from meshwright.model import Decoder, Draws
from meshwright.model.block import Block
from meshwright.model.feedforward import FeedForward
from meshwright.model.head import Head
from meshwright.model.norm import make_norm
from meshwright.model.rotary import rotary_tables

B, S = 2, 7
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "width": 24,
    "layers": 2,
    "heads": 4,
    "ffn_width": 20,
    "max_sequence_length": 16,
}
GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "qkv_bias": True,
    "linear_bias": True,
    "tied": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped": {"kv_heads": 2},
    "head_dim": {"head_dim": 10, "kv_heads": 1},
    "qk_norm": {"qk_norm": True, "kv_heads": 2},
    "biases": {"qkv_bias": True, "linear_bias": True},
    "tied": {"tied": True},
    "window": {"sliding_window": 3},
    "wide window": {"sliding_window": 7},
    "dropout": {"dropout": 0.1},
    "gpt2": GPT2,
    "gpt2 dropout": GPT2 | {"dropout": 0.1},
    "learned swiglu qk_norm": {"positions": "learned", "qk_norm": True},
    "experts": {"experts": {"count": 4, "top_k": 2, "ffn_width": 12}},
    "experts, scores as they are": {"experts": {"count": 4, "top_k": 1, "ffn_width": 12, "normalised": False}},
    "experts, one shared": {
        "experts": {"count": 6, "top_k": 2, "ffn_width": 12, "shared_width": 8, "scores": "sigmoid", "first_dense": 1}
    },
    "latent": {"head_dim": 12, "latent": {"kv_rank": 10, "q_rank": 14, "rope_dim": 4, "value_dim": 8}},
    "latent, queries at once": {"head_dim": 12, "latent": {"kv_rank": 10, "rope_dim": 4, "value_dim": 8}},
}


def counted(run: Callable[[], Tensor], left_out: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages autograd saves in a forward pass, those of `left_out` aside."""
    known = {tensor.untyped_storage().data_ptr() for tensor in left_out}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in known)


Case = tuple[Callable[..., Cost], nn.Module, Callable[[], Tensor], list[Tensor]]


def cases(shape: Model, dtype: torch.dtype) -> dict[str, Case]:
    """What states a piece's cost, the piece, a training forward of it, and the constants its owner accounts for."""
    x = torch.randn(B, S, shape.width, dtype=dtype, requires_grad=True)
    tables = rotary_tables(shape, torch.arange(S).unsqueeze(0), dtype) if shape.positions == "rope" else None
    constants = list(tables or ())
    tokens, labels = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, S))
    draws = Draws(0, 0, torch.arange(B))
    norm, block = make_norm(shape).to(dtype), Block(shape, shape.layers - 1).to(dtype)
    attention = block.attention
    feedforward, head, decoder = FeedForward(shape).to(dtype), Head(shape).to(dtype), Decoder(shape).to(dtype)
    return {
        "norm": (norm_cost, norm, lambda: norm(x), []),
        "attention": (attention_cost, attention, lambda: attention(x, tables), constants),
        "feedforward": (feedforward_cost, feedforward, lambda: feedforward(x), []),
        "block": (block_cost, block, lambda: block(x, tables, draws=draws), constants),
        "head": (head_cost, head, lambda: head(x, labels, B * S), []),
        "decoder": (decoder_cost, decoder, lambda: decoder(tokens, labels, B * S, draws=draws), []),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stated_bytes_equal_counted_bytes(variant: str, dtype: torch.dtype) -> None:
    shape = Model(**SMALL | VARIANTS[variant])
    for name, (cost, module, run, constants) in cases(shape, dtype).items():
        stated = cost(shape, B, S, dtype.itemsize)
        assert counted(run, [*module.parameters(), *constants]) == stated.saved_total, (name, stated.saved_bytes)
        assert stated.parameters == sum(parameter.numel() for parameter in module.parameters()), name


def grouped(q: Any, kv: Any) -> tuple[int, ...]:
    """The shape of keys or values with a head for every query head; torch 2.11 counts no groups."""
    return (kv[0], q[1], kv[2], kv[3])


def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, *(grouped(q, shape) for shape in (k, v))))


def attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, *(grouped(q, shape) for shape in (k, v))))


def added_product_flops(_: Any, left: Any, right: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


# The counter passes over the CPU's attention kernel and over products added in place.
NOT_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.aten.addmm_: added_product_flops,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_stated_flops_equal_counted_flops(variant: str) -> None:
    shape = Model(**SMALL | VARIANTS[variant])
    for name, (cost, _, run, _) in cases(shape, torch.float32).items():
        stated = cost(shape, B, S, 4)
        with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as forward:
            out = run()
        with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as backward:
            out.sum().backward()
        assert (forward.get_total_flops(), backward.get_total_flops()) == (
            stated.forward_flops,
            stated.backward_flops,
        ), name


def test_names_say_which_tensor() -> None:
    cost = decoder_cost(preset("tiny-llama"), 1, 4, 2)
    assert cost.saved_bytes["layers.1.ffn.gate"] == 4 * 128 * 2
    assert cost.saved_bytes["layers.0.attention.lse"] == 4 * 4 * 4
    assert cost.saved_bytes["head.weight_gradient"] == 512 * 64 * 2


def test_a_name_counted_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Cost(saved_bytes={"input": 1}) + Cost(saved_bytes={"input": 2})
