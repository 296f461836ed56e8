"""Projections made as one product give what they give apart, gradients included."""

import pytest
import torch

from meshwright.job.model import Model
from meshwright.model.block import Block
from meshwright.model.rotary import rotary_tables

SHAPES = {
    "grouped, gated": {"heads": 4, "kv_heads": 2},
    "biases, no gate": {"heads": 4, "kv_heads": 4, "qkv_bias": True, "linear_bias": True, "activation": "gelu"},
    "biases of q, k and v alone": {"heads": 4, "kv_heads": 1, "qkv_bias": True},
}


@pytest.mark.parametrize("given", SHAPES.values(), ids=SHAPES.keys())
def test_one_product_is_the_same(given: dict[str, object]) -> None:
    shape = Model.model_validate({"vocab_size": 8, "width": 16, "ffn_width": 24, "head_dim": 4, **given})
    torch.manual_seed(0)
    block = Block(shape, 0).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(shape, torch.arange(5).unsqueeze(0), torch.float64)
    seen = []
    for fused in (False, True):
        block.attention.fused = block.ffn.fused = fused
        out = block(x, tables)
        seen.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    for apart, joined in zip(*seen, strict=True):
        torch.testing.assert_close(joined, apart, rtol=1e-12, atol=1e-12)
