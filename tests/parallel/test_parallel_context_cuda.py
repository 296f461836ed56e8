"""On a GPU the blocks of a ring, all ranks played on one card, equal CausalAttend on a CPU in float64."""

import pytest
import torch
from torch import Tensor

from meshwright.model import CausalAttend, Documents
from meshwright.parallel.context.order import order_of, zigzag_places
from meshwright.parallel.context.rings import ring_backward, ring_forward, run_in_step

pytestmark = pytest.mark.gpu

B, S, H, E = 2, 512, 4, 64
IDS = torch.stack([torch.tensor([0] * 300 + [1] * 3 + [2] * 209), torch.tensor([0] * 64 + [1] * 64 + [2] * 384)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "documents"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_equals_the_cpu(
    ranks: int, kv_heads: int, window: int | None, ids: Tensor | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(B, S, heads, E, dtype=dtype) for heads in (H, kv_heads, kv_heads, H))
    leaves = [tensor.double().clone().requires_grad_() for tensor in (q, k, v)]
    out, lse = CausalAttend(window)(leaves[0], leaves[1], leaves[2], None, None if ids is None else Documents(ids))
    assert lse is not None
    expected = [out.detach(), lse.transpose(1, 2), *torch.autograd.grad(out, leaves, grad.double())]

    device = torch.device("cuda")
    documents = None if ids is None else Documents(ids.to(device), at_most=8)
    orders = [order_of(rank, ranks, S, documents, window, device) for rank in range(ranks)]
    places = [zigzag_places(S, rank, ranks) for rank in range(ranks)]
    qs, grads = ([tensor[:, held].to(device) for held in places] for tensor in (q, grad))
    kvs = [torch.stack((k[:, held], v[:, held])).to(device) for held in places]
    forward = run_in_step([ring_forward(*given) for given in zip(qs, kvs, orders, strict=True)])
    backward = run_in_step(
        [
            ring_backward(grad, q, kv, out, lse, order)
            for grad, q, kv, (out, lse), order in zip(grads, qs, kvs, forward, orders, strict=True)
        ]
    )
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for (out, lse), gradients, held in zip(forward, backward, places, strict=True):
        for found, whole in zip([out, lse.transpose(1, 2), *gradients], expected, strict=True):
            torch.testing.assert_close(found.cpu().double(), whole[:, held], rtol=tolerance, atol=tolerance)
