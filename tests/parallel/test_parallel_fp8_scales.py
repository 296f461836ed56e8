"""fp8 products with scales by row and by block, against a sequential reference, and what is true of finer scales."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.parallel.fp8 import Fp8Linear, fp8_linear, quantise, use_fp8
from meshwright.parallel.fp8_scales import NARROW, by_line, by_row, by_square, exact_product, scaled_product
from meshwright.torch_private.arithmetic import scaled_mm

SIZES = {"row": ((1, 10**6), (1, 10**6)), "block": ((1, 128), (128, 128))}
"""Down and across, of activations and gradients, and of weights."""


def rounded(x: Tensor, down: int, across: int) -> Tensor:
    """What a matrix stands for once each of its blocks was written in e4m3 with a scale of its own, block by block."""
    result = torch.empty_like(x, dtype=torch.float64)
    for row in range(0, x.shape[0], down):
        for column in range(0, x.shape[1], across):
            block = x[row : row + down, column : column + across]
            scale = (block.abs().max().float() / torch.finfo(NARROW).max).clamp(min=1e-38).double()
            result[row : row + down, column : column + across] = (block.double() / scale).to(NARROW).double() * scale
    return result


def sequential_reference(x: Tensor, weight: Tensor, grad: Tensor, scales: str) -> tuple[Tensor, Tensor, Tensor]:
    """Result and gradients, every product with operands rounded along the dim it sums over, and exact sums."""
    line, square = SIZES[scales]
    out = rounded(x, *line) @ rounded(weight, *square).t()
    grad_x = rounded(grad, *line) @ rounded(weight.t(), *square).t()
    grad_weight = rounded(grad.t(), *line) @ rounded(x.t(), *line).t()
    return out, grad_x, grad_weight


def operands(tokens: int, outputs: int, inputs: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of very different sizes, so that the wrong scale for one of them shows."""
    generator = torch.Generator().manual_seed(0)
    shapes, sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs)), (3.0, 0.02, 1e-7)
    made = []
    for shape, size in zip(shapes, sizes, strict=True):
        down, across = (torch.randn(side, generator=generator).exp() for side in shape)
        entries = torch.randn(shape, generator=generator) * down[:, None] * across * size
        made.append(entries.to(device, torch.bfloat16))
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2]


def run(function: Any, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = function(x, weight)
    out.backward(grad)
    assert x.grad is not None and weight.grad is not None
    results = out.detach(), x.grad, weight.grad
    x.grad = weight.grad = None
    return results


def of(scales: str) -> Any:
    return lambda x, weight: fp8_linear(x, weight, None, scales)


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().double() - expected).norm() / expected.norm())


SHAPES = [(256, 384, 128), (48, 80, 208)]
"""Whole blocks, and blocks that end early in every dim."""


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scales", ["row", "block"])
def test_result_and_gradients_are_those_of_the_sequential_reference(scales: str, shape: tuple[int, int, int]) -> None:
    x, weight, grad = operands(*shape)
    expected = sequential_reference(x.detach(), weight.detach(), grad, scales)
    functions = [of(scales)]
    if shape == SHAPES[1]:
        functions.append(torch.compile(of(scales), backend="aot_eager", fullgraph=True))
    for function in functions:
        for value, reference in zip(run(function, x, weight, grad), expected, strict=True):
            assert value.dtype == torch.bfloat16 and value.is_contiguous()
            assert distance(value, reference) < 2**-8  # the result's own rounding
    other = sequential_reference(x.detach(), weight.detach(), grad, "block" if scales == "row" else "row")
    assert max(distance(a, b) for a, b in zip(expected, other, strict=True)) > 2**-8  # they can be told apart


def test_finer_scales_are_truer_where_rows_differ() -> None:
    """Rows a million times smaller vanish beside others under one scale, and are as good as any under their own."""
    x, weight, _ = operands(64, 64, 256)
    with torch.no_grad():
        x[::2] *= 1e-6
    exact = x.detach().double() @ weight.detach().double().t()
    errors = {scales: distance(of(scales)(x, weight)[::2], exact[::2]) for scales in ("tensor", "row", "block")}
    assert errors["tensor"] > 0.3 and errors["row"] < 0.05 and errors["block"] < 0.05, errors


def test_without_a_kernel_the_product_is_torchs_own() -> None:
    """A CPU has one for scales of tensors, and it computes the same to the bit."""
    x, weight, _ = operands(32, 48, 64)
    [(left, left_scale), (right, right_scale)] = [quantise(tensor.detach(), NARROW) for tensor in (x, weight)]
    theirs = scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16)
    assert torch.equal(
        exact_product(left, right, left_scale.view(1, 1), right_scale.view(1, 1), torch.bfloat16), theirs
    )


def test_scales_belong_to_their_blocks() -> None:
    x = operands(200, 16, 300)[0].detach()
    for make, scales, values in (
        (by_row, (200, 1), (200, 300)),
        (by_line, (200, 3), (200, 384)),
        (by_square, (2, 3), (256, 384)),
    ):
        operand = make(x)
        assert (tuple(operand.scales.shape), tuple(operand.values.shape), operand.size) == (scales, values, 200)
        assert operand.values.float().abs().max() == torch.finfo(NARROW).max and not operand.values[200:].float().any()
    assert not by_row(torch.zeros(2, 16)).values.float().any() and bool((by_row(torch.zeros(2, 16)).scales > 0).all())


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_number_shows(scales: str, bad: float) -> None:
    x, weight, _ = operands(32, 48, 64)
    out = of(scales)(x.detach().index_fill(1, torch.tensor([1]), bad), weight)
    assert not out.isfinite().any()


def test_linears_take_the_scales_of_their_job() -> None:
    blocks = torch.nn.ModuleDict({"0": torch.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)})
    use_fp8(blocks, "row")
    linear = blocks["0"]
    assert isinstance(linear, Fp8Linear) and linear.scales == "row"
    x = torch.randn(16, 32).bfloat16()
    assert torch.equal(linear(x), fp8_linear(x, linear.weight, None, "row"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (128, 256, 640)], ids=str)
@pytest.mark.parametrize("scales", ["row", "block"])
def test_on_a_gpu_the_kernels_follow_the_reference(scales: str, shape: tuple[int, int, int]) -> None:
    """640 summed numbers are five blocks: cuBLAS wants the scales of squares filled up to eight."""
    if scales == "block" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuBLAS multiplies blocks on Hopper only")
    torch._dynamo.reset()  # which compiles a function for so many shapes and no more
    line, square = (by_row, by_row) if scales == "row" else (by_line, by_square)
    x, weight, grad = (tensor.detach() for tensor in operands(*shape, device="cuda"))
    for left, right in ((line(x), square(weight)), (line(grad), square(weight.t())), (line(grad.t()), line(x.t()))):
        parts = [left.values, right.values, left.scales, right.scales]
        a, b, of_a, of_b = (part.cpu() for part in parts)
        exact = exact_product(a, b, of_a, of_b, torch.float32)
        assert distance(scaled_product(*parts, torch.bfloat16, False).cpu(), exact.double()) < 2**-8
    expected = sequential_reference(x.cpu(), weight.cpu(), grad.cpu(), scales)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    for function in (of(scales), torch.compile(of(scales), fullgraph=True)):
        for value, reference in zip(run(function, x, weight, grad), expected, strict=True):
            assert distance(value.cpu(), reference) < 2**-6  # a device may divide otherwise, and round to a neighbour
