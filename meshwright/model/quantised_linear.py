"""Projections whose weights are stored in 4 or 8 bits and made anew for every product, forward and backward.

B batch, S sequence, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.quantised import Packed, dequantise_int8, dequantise_nf4, tables
from meshwright.torch_private.autograd import takes_context

ABSMAX, SCALES, TABLE = "weight_absmax", "weight_scales", "weight_table"
"""What a projection has besides `weight`, which are its codes: of nf4 all of them, of int8 the scales."""
Place = tuple[int, int, int]
"""Of the codes here in the whole matrix: first row, first block of a row, blocks of a whole row (0 for int8)."""
Kind = tuple[str, Place]
"""The format of a weight and the place of what is here of it; no format if it is stored as it is computed with."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Storage:
    """How a projection's codes are stored here, and in what company; the functions are replaced where ranks share
    them."""

    format: str
    place: Place
    own: Callable[[Tensor], Tensor] = _same
    """A parameter's own part of this rank."""
    placed: Callable[[Tensor], Tensor] = _same
    """A weight made from own parts, as what activations are multiplied with."""
    apart: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
    """Applies a function of plain tensors to activations that are shared by ranks."""


class QuantisedLinear(nn.Linear):
    """A projection without an adapter."""

    def forward(self, x_BSI: Tensor) -> Tensor:
        out_BSO = base_product((self,), x_BSI)
        return out_BSO if self.bias is None else out_BSO + self.bias


def storage_of(linear: nn.Module) -> Storage | None:
    """How a projection is quantised; None if it is not."""
    found: Storage | None = getattr(linear, "storage", None)
    return found


def _storage(linear: nn.Module) -> Storage:
    found = storage_of(linear)
    assert found is not None
    return found


def base_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight of a projection, whatever it is stored as; of a quantised one without a gradient."""
    storage = storage_of(linear)
    if storage is None:
        return linear.weight
    with torch.no_grad():
        return storage.placed(_made(stored(linear), kind_of(linear), dtype))


def base_product(linears: Sequence[nn.Linear], x_BSI: Tensor) -> Tensor:
    """x · Wᵀ for projections of one input, all of them quantised, next to each other."""
    # No comprehension that assigns: the compiler would stop here.
    kinds = tuple([kind_of(linear) for linear in linears])
    tensors = [tensor for linear in linears for tensor in stored(linear)]
    apart = _storage(linears[0]).apart
    if apart is None:
        return _multiplied(x_BSI, kinds, *tensors)
    return apart(lambda own_BSI: _multiplied(own_BSI, kinds, *tensors), x_BSI)


def fill_scales(linear: nn.Module, packed: Packed) -> None:
    """Store what is whole on every rank of a quantised weight: its scales, and what codes stand for."""
    buffers = dict(linear.named_buffers(recurse=False))
    buffers[SCALES].copy_(packed.scales)
    if TABLE in buffers:
        buffers[TABLE].copy_(tables())


def kind_of(linear: nn.Linear) -> Kind:
    """How a projection's weight is stored."""
    storage = storage_of(linear)
    return ("", (0, 0, 0)) if storage is None else (storage.format, storage.place)


def stored(linear: nn.Linear) -> tuple[Tensor, ...]:
    """What a weight is made from: codes, in nf4 those of scales too, and then what is small; or the weight itself."""
    storage = storage_of(linear)
    if storage is None:
        return (linear.weight,)
    names = ("weight", SCALES) if storage.format == "int8" else ("weight", ABSMAX, SCALES, TABLE)
    return tuple([storage.own(getattr(linear, name)) for name in names])


def made(parts: Sequence[Tensor], kinds: tuple[Kind, ...], dtype: torch.dtype) -> list[Tensor]:
    """Weights from what `stored` gives of each, one after the other."""
    each = len(parts) // len(kinds)
    return [_made(parts[n * each : n * each + each], kind, dtype) for n, kind in enumerate(kinds)]


def made_again(parts: Sequence[Tensor], kinds: tuple[Kind, ...], gradient: Tensor) -> list[Tensor]:
    """The same in a backward that has just got this gradient."""
    each = len(parts) // len(kinds)
    if torch.compiler.is_compiling() and each > 1:
        # The compiler would see that the forward has computed the same, and keep that: four times as much memory.
        parts = [_after(t, gradient) if n % each >= each // 2 else t for n, t in enumerate(parts)]
    return made(parts, kinds, gradient.dtype)


def _made(parts: Sequence[Tensor], kind: Kind, dtype: torch.dtype) -> Tensor:
    format_, place = kind
    if not format_:
        return parts[0]
    if format_ == "int8":
        codes, scales = parts
        return dequantise_int8(codes, scales[place[0] : place[0] + codes.shape[0]], dtype)
    codes, absmax_OG, scales, table = parts
    return dequantise_nf4(codes, absmax_OG, scales, table, place, dtype)


def _multiplied(x_BSI: Tensor, kinds: tuple[Kind, ...], *parts: Tensor) -> Tensor:
    out_BSO: Tensor = _Product.apply(x_BSI, kinds, *parts)  # type: ignore[no-untyped-call]
    return out_BSO


class _Product(torch.autograd.Function):
    """x · Wᵀ; only what W is made from is kept for the backward."""

    @staticmethod
    @takes_context
    def forward(ctx: Any, x_BSI: Tensor, kinds: tuple[Kind, ...], *parts: Tensor) -> Tensor:
        ctx.kinds = kinds
        ctx.save_for_backward(*parts)
        return F.linear(x_BSI, _joined(made(parts, kinds, x_BSI.dtype)))

    @staticmethod
    def backward(ctx: Any, gradient_BSO: Tensor) -> tuple[Any, ...]:
        parts = ctx.saved_tensors  # a recomputation gives them once
        weight_OI = _joined(made_again(parts, ctx.kinds, gradient_BSO))
        return (gradient_BSO @ weight_OI, None, *(None for _ in parts))


@torch.library.custom_op("meshwright::after", mutates_args=())
def _after(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a tensor, which a compiler takes to depend on another."""
    return tensor.clone()


@_after.register_fake
def _(tensor: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
