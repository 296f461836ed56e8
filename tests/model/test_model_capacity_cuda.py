"""On a GPU a fixed number of rows means that the host never waits for the device."""

import pytest
import torch

from meshwright.job import Model
from meshwright.model.moe import MixtureOfExperts

pytestmark = pytest.mark.gpu


def test_experts_with_a_capacity_do_not_let_the_host_wait() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_width": 64, "capacity": 0.75}
    shape = Model(vocab_size=32, width=64, layers=1, heads=2, experts=experts)
    assert shape.experts is not None
    moe = MixtureOfExperts(shape, shape.experts).to("cuda", torch.bfloat16)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x).sum().backward()  # kernels are loaded on first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None and bool(x.grad.isfinite().all()) and int(moe.router.dropped) >= 2 * 64
