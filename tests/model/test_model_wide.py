"""Products of bf16 matrices in float32: as exact as float32's own, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.model.wide import wide_product


def check(device: str, compiled: bool) -> None:
    """The result against float64 as float32 would be, gradients as bf16 rounds them; bf16's own product is far off."""
    torch.manual_seed(0)
    x, weight = torch.randn(96, 256, device=device).bfloat16(), torch.randn(16, 256, device=device).bfloat16()
    seed = torch.randn(96, 16, device=device)

    def run(inputs: list[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = multiply(*leaves)
        return [each.double() for each in (out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype)))]

    product = torch.compile(wide_product, backend="aot_eager", fullgraph=True) if compiled else wide_product
    exact = run([x.double(), weight.double()], lambda x, weight: x @ weight.t())
    ours, bf16 = run([x, weight], product), run([x, weight], lambda x, weight: x @ weight.t())
    for own, other, narrow, rounding in zip(ours, exact, bf16, (1e-6, 2**-8, 2**-8), strict=True):
        torch.testing.assert_close(
            own, other, rtol=1.02 * rounding, atol=max(1e-6, rounding / 40) * float(other.abs().max())
        )
        assert (own - other).norm() < 0.9 * (narrow - other).norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_not_rounded(compiled: bool) -> None:
    check("cpu", compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_nor_are_they_on_a_gpu(compiled: bool) -> None:
    check("cuda", compiled)
