"""On a GPU the kernel by hand gives the gradient autograd gives in float64, compiled and not."""

import pytest
import torch

from meshwright.model.swiglu import swiglu, swiglu_down

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
@pytest.mark.parametrize("width", [8, 2048, 5000])
def test_the_gradient_is_autograds(width: int, dtype: torch.dtype, bound: float, compiled: bool) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 7, 2 * width, device="cuda", dtype=dtype)
    grad = torch.randn(3, 7, width, device="cuda", dtype=dtype)
    seen = gate_up.clone().requires_grad_()
    out = (torch.compile(swiglu) if compiled else swiglu)(seen)
    out.backward(grad)
    exact = gate_up.double().cpu().requires_grad_()
    expected = swiglu(exact)
    expected.backward(grad.double().cpu())
    assert seen.grad is not None and exact.grad is not None
    for value, reference in ((out, expected), (seen.grad, exact.grad)):
        difference = (value.detach().double().cpu() - reference.detach()).abs().max() / reference.detach().abs().max()
        assert difference < bound


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_with_the_next_product_too(dtype: torch.dtype, bound: float, compiled: bool) -> None:
    """Its backward computes the result of swiglu again."""
    torch.manual_seed(0)
    given = [torch.randn(3, 64, 2 * 96, device="cuda", dtype=dtype), torch.randn(48, 96, device="cuda", dtype=dtype)]
    grad = torch.randn(3, 64, 48, device="cuda", dtype=dtype)
    inputs, exact = [t.clone().requires_grad_() for t in given], [t.double().cpu().requires_grad_() for t in given]
    out = (torch.compile(swiglu_down) if compiled else swiglu_down)(*inputs)
    out.backward(grad)
    expected = torch.nn.functional.linear(swiglu(exact[0]), exact[1])
    expected.backward(grad.double().cpu())
    pairs = [(out, expected), *((one.grad, other.grad) for one, other in zip(inputs, exact, strict=True))]
    for value, reference in pairs:
        assert value is not None and reference is not None
        difference = (value.detach().double().cpu() - reference.detach()).norm() / reference.detach().norm()
        assert difference < bound
