"""Compares the kernels of rows for experts, in Triton's interpreter on a CPU, with torch's operations in float64.

A process of its own, since TRITON_INTERPRET must be set before Triton is imported."""

import torch
from torch import Tensor

from meshwright.model import rows

rows.has_kernels = lambda x: True

TOKENS, TOP_K = 7, 3


def close(ours: Tensor, expected: Tensor, bound: float) -> None:
    """By the largest entry; sums over a row are rounded in its format."""
    assert ours.shape == expected.shape
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max(), (ours, expected)


def gradients(result: Tensor, inputs: list[Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, seed.to(result.dtype))


def check(width: int, dtype: torch.dtype, bound: float) -> None:
    """All four functions and their gradients; a width that is no multiple of a block leaves part of one unused."""
    slots = torch.randperm(TOKENS * TOP_K)
    place = torch.empty_like(slots)
    place[slots] = torch.arange(len(slots))
    place_TK, tokens = place.view(TOKENS, TOP_K), slots // TOP_K
    wide = torch.promote_types(dtype, torch.float32)

    def drawn(*size: int, kind: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
        made = torch.randn(size).to(kind)
        return made.requires_grad_(), made.detach().double().requires_grad_()

    x, x_exact = drawn(TOKENS, width)
    given, given_exact = drawn(len(slots), width)
    gate_up, gate_up_exact = drawn(len(slots), 2 * width)
    weights, weights_exact = drawn(TOKENS, TOP_K, kind=wide)
    gate, up = gate_up_exact.chunk(2, dim=1)
    of_row = weights_exact.flatten()[slots].unsqueeze(1)
    cases = [
        (rows.gathered(x, slots, place_TK), x_exact[tokens], [x], [x_exact]),
        (rows.summed(given, slots, place_TK), given_exact[place_TK].sum(1), [given], [given_exact]),
        (
            rows.weighted_sum(given, weights, slots, place_TK),
            (given_exact[place_TK] * weights_exact.unsqueeze(-1)).sum(1),
            [given, weights],
            [given_exact, weights_exact],
        ),
        (
            rows.weighted_swiglu(gate_up, weights, slots),
            torch.nn.functional.silu(gate) * up * of_row,
            [gate_up, weights],
            [gate_up_exact, weights_exact],
        ),
    ]
    for ours, expected, inputs, exact in cases:
        assert ours.dtype == dtype
        close(ours.detach(), expected.detach(), bound)
        seed = torch.randn_like(expected).to(dtype).double()
        pairs = zip(gradients(ours, inputs, seed), gradients(expected, exact, seed), strict=True)
        for own, other in pairs:
            close(own, other, bound)


if __name__ == "__main__":
    torch.manual_seed(0)
    check(24, torch.float64, 1e-12)
    check(3000, torch.float64, 1e-12)
    check(768, torch.bfloat16, 2**-7)
    print("equal")
