"""Matrix products of the blocks in fp8: one dynamic scale per tensor, e4m3 forward, e5m2 for gradients.

x × weightᵀ and both of its gradients are products of 8-bit numbers, summed in float32. Everything else (norms,
attention, embedding, head, the working copy of the weights) stays bf16, masters and optimizer fp32; `fp8_scales` has
finer scales, `fp8_head` the head. What is kept for the backward is the bf16 weight, so that zero 3 can free the
gathered one, and the bf16 input, which q, k and v share; compiled on a GPU, where they are one product, the fp8 input
as the weight's gradient needs it: the hardware multiplies fp8 matrices only along their last dims, and what one product
reads by rows another reads by columns.
M tokens, N outputs, K inputs.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.errors import UserError
from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.layout import FP8_MULTIPLE
from meshwright.parallel.fp8_scales import Cast, fine_cast, fine_product
from meshwright.torch_private.arithmetic import scaled_mm
from meshwright.torch_private.autograd import takes_context

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def use_fp8(blocks: nn.Module, scales: str = "tensor") -> None:
    """Let every linear inside some blocks compute in fp8, in place; parameters and their names stay."""
    for name, module in blocks.named_modules():
        if type(module) is nn.Linear:
            if module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
                raise UserError(
                    f'precision.compute = "fp8" needs matrices with sides that are multiples of {FP8_MULTIPLE}, but '
                    f'"layers.{name}" is {module.out_features} × {module.in_features}; widen it or set '
                    'precision.compute = "bf16"'
                )
            module.__class__ = Fp8Linear
            cast(Fp8Linear, module).scales = scales


class Fp8Linear(nn.Linear):
    """A linear whose products are fp8."""

    scales = "tensor"
    """What has a scale of its own: precision.fp8_scales."""
    cast: Cast | None = None
    """The weight in fp8, or those of all projections that are one product with it, while `fp8_casts` keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """The product, of this linear's weight or of several concatenated."""
        return fp8_linear(x, weight_NK, bias_N, self.scales, self.cast)


def fp8_linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, scales: str = "tensor", cast_NK: Cast | None = None
) -> Tensor:
    """x × weightᵀ + bias with fp8 products; tensor-parallel shards are scaled separately."""
    if isinstance(weight_NK, DTensor):
        out: Tensor = _on_shards(cast(DTensor, x), weight_NK, scales, cast_NK)
    else:
        out = _products(x, weight_NK, scales, cast_NK)
    return out if bias_N is None else out + bias_N


def cast_weight(weight_NK: Tensor, scales: str) -> Cast:
    """A weight in fp8 for all products with it until it changes."""
    if scales != "tensor":
        return fine_cast(weight_NK, scales)
    scale = _scale(weight_NK, FORWARD)
    if weight_NK.is_cuda and HAS_TRITON:
        plain, turned = fp8_both_ways(weight_NK, scale, FORWARD, True)
    else:
        plain, turned = _both_ways(weight_NK, scale, FORWARD)
    return Cast(plain, scale, turned, scale)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q, scale) with x ≈ q × scale: the largest entry of x becomes the format's largest."""
    scale = _scale(x, dtype)
    return narrowed(x, scale, dtype), scale


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    # By rows first: the compiler can do that in the kernel that computes x, and need not read x again.
    return scale_of_largest(x.abs().amax(dim=-1).amax().float(), dtype)


def scale_of_largest(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of a tensor whose largest entry is this: it becomes the format's largest."""
    return (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def narrowed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in fp8."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


@torch.library.custom_op("meshwright::fp8_both_ways", mutates_args=())
def fp8_both_ways(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool) -> tuple[Tensor, Tensor]:
    """x / scale in fp8, and the same transposed; the first is empty unless `plain`.

    Hand-written, since the compiler transposes in a kernel that writes across memory: on an H200 seven times as
    long as reading and writing takes.
    """
    from meshwright.parallel.fp8_kernel import launch

    return launch(x.contiguous(), scale, dtype, plain)


@fp8_both_ways.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty((rows, columns) if plain else (0,), dtype=dtype), x.new_empty((columns, rows), dtype=dtype)


def _products(x: Tensor, weight_NK: Tensor, scales: str, cast_NK: Cast | None) -> Tensor:
    x_MK = x.flatten(0, -2)
    if scales == "tensor":
        given = () if cast_NK is None else (cast_NK.values, cast_NK.turned, cast_NK.scales)
        out_MN: Tensor = _Fp8Product.apply(x_MK, weight_NK, *given)  # type: ignore[no-untyped-call]
    else:
        out_MN = fine_product(x_MK, weight_NK, scales, cast_NK)
    return out_MN.view(*x.shape[:-1], -1)


def _on_shards(x: DTensor, weight: DTensor, scales: str, cast_NK: Cast | None) -> DTensor:
    """The product on this rank's shard of a weight sharded by outputs, by inputs, or not at all."""
    [placement], last = weight.placements, x.dim() - 1
    ways: dict[Placement, tuple[Placement, Placement]] = {
        Shard(0): (Shard(last), Partial()),  # each rank's outputs give a part of the input's gradient
        Shard(1): (Partial(), Shard(last)),
        Replicate(): (Replicate(), Replicate()),
    }
    out, grad_x = ways[placement]
    local = _products(x.to_local(grad_placements=[grad_x]), weight.to_local(), scales, cast_NK)
    return DTensor.from_local(local, weight.device_mesh, [out], run_check=False)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    @takes_context
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, *cast: Tensor) -> Tensor:
        x_scale, kept_weight = _scale(x_MK, FORWARD), weight_NK
        if cast:
            weight, kept_weight, weight_scale = cast
        else:
            weight, weight_scale = quantise(weight_NK, FORWARD)
        ctx.dtype, ctx.given = weight_NK.dtype, len(cast)
        if ctx.needs_input_grad[1] and _by_hand(x_MK):
            x, kept = fp8_both_ways(x_MK, x_scale, FORWARD, True)
        else:
            x, kept = narrowed(x_MK, x_scale, FORWARD), x_MK
        ctx.save_for_backward(kept, kept_weight, x_scale, weight_scale)
        # Fast accumulation sums in fewer bits than float32 (about 14 on Hopper, arXiv:2412.19437 section 3.3.2),
        # more than bf16 keeps of the result; gradients, which are summed over all tokens, do without it.
        return _scaled(x, weight, x_scale, weight_scale, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_weight, x_scale, weight_scale = ctx.saved_tensors
        grad_scale, out = _scale(grad_MN, GRADIENT), grad_MN.dtype
        grad_MN, grad_NM = _both_ways(grad_MN, grad_scale, GRADIENT)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_KN = kept_weight if ctx.given else _turned(kept_weight, weight_scale)
            grad_x = _scaled(grad_MN, weight_KN, grad_scale, weight_scale, out, fast=False)
        if ctx.needs_input_grad[1]:
            x_KM = kept if kept.dtype == FORWARD else _turned(kept, x_scale)
            grad_weight = _scaled(grad_NM, x_KM, grad_scale, x_scale, ctx.dtype, fast=False)
        return grad_x, grad_weight, *(None for _ in range(ctx.given))


def _by_hand(x: Tensor) -> bool:
    """Whether `fp8_both_ways` can be used and is faster."""
    return x.is_cuda and HAS_TRITON and torch.compiler.is_compiling()


def _both_ways(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if _by_hand(x):
        plain, turned = fp8_both_ways(x, scale, dtype, True)
        return plain, turned
    narrow = narrowed(x, scale, dtype)
    return narrow, narrow.t().contiguous()


def _turned(x: Tensor, scale: Tensor) -> Tensor:
    """A forward operand as the backward needs it."""
    if _by_hand(x):
        _, turned = fp8_both_ways(x, scale, FORWARD, False)
        return cast(Tensor, turned)
    return narrowed(x, scale, FORWARD).t().contiguous()


def _scaled(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, out: torch.dtype, fast: bool
) -> Tensor:
    """left × rightᵀ; the hardware needs the summed dim of both last in memory."""
    return scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=out, use_fast_accum=fast)
