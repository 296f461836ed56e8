"""Low-rank adapters (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353) of a block's projections.

The weights next to them stay as they are. B batch, S sequence, I inputs, O outputs, R rank.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Adapter, Model
from meshwright.job.adapter import adapted
from meshwright.job.encoder import encoder_part
from meshwright.model.adapted import adapted_product
from meshwright.model.dropout import Draws, keep_mask
from meshwright.model.quantised_linear import base_product, base_weight, storage_of

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
_SITES = ("q", "k", "v", "o", "gate", "up", "down", "q_down", "kv_down", "kv", "k_rope")
_FIRST_SITE = 3
"""Of dropout: the model's own sites come before."""


def is_adapter(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return parameter.rpartition(".")[2] in (A, B, MAGNITUDE)


def is_frozen(shape: Model, parameter: str) -> bool:
    """Whether a parameter of a model is not trained."""
    if shape.encoder is not None:
        return encoder_part(parameter) not in shape.encoder.train
    return shape.adapter is not None and not is_adapter(parameter)


def adapt(block: nn.Module, shape: Model, layer: int) -> None:
    """Give the projections of a block that the shape's adapter names their matrices, in place."""
    for group, name in adapted(shape, layer):
        linear = block.get_submodule(f"{group}.{name}")
        assert isinstance(linear, nn.Linear) and shape.adapter is not None
        linear.__class__ = AdaptedLinear
        cast(AdaptedLinear, linear).add(shape.adapter, _FIRST_SITE + _SITES.index(name))


class AdaptedLinear(nn.Linear):
    """x · Wᵀ + scale · drop(x) · Aᵀ · Bᵀ + bias; with DoRA, both products times the magnitude over the length of
    W + scale · B · A, row by row."""

    fused = False
    """Whether its products are added to each other as they are made."""

    def add(self, adapter: Adapter, site: int) -> None:
        """Add the adapter's parameters to a linear that has been built."""
        self.scale, self.rate, self.site = adapter.scale, adapter.dropout, site
        self.lora_a = nn.Parameter(torch.empty(adapter.rank, self.in_features))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, adapter.rank))
        self.lora_magnitude = nn.Parameter(torch.empty(self.out_features)) if adapter.dora else None
        self.keep: Callable[[AdaptedLinear, Tensor, Draws], Tensor] = _keep
        """The dropout mask of an input; replaced where a rank has only some of its channels."""

    def forward(self, x_BSI: Tensor, draws: Draws | None = None) -> Tensor:
        if self.adds_up(draws):
            out_BSO = adapted_product(x_BSI, (self,), self.scale)
            return out_BSO if self.bias is None else out_BSO + self.bias
        if self.lora_magnitude is None:
            # In this order a recomputation, which ends when all that was saved is there, spares the large product.
            return self.update(x_BSI, draws) + self._base(x_BSI, self.bias)
        # As its authors do, and PEFT, the length is a constant in the backward.
        share_O = self.lora_magnitude / self._lengths()
        out_BSO = share_O.to(x_BSI.dtype) * (self._base(x_BSI, None) + self.update(x_BSI, draws))
        return out_BSO if self.bias is None else out_BSO + self.bias

    def adds_up(self, draws: Draws | None) -> bool:
        """Whether it computes what `adapted_product` does, and shall by that."""
        return self.fused and self.lora_magnitude is None and (draws is None or self.rate == 0.0)

    def _base(self, x_BSI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The projection without its adapter."""
        if storage_of(self) is None:
            return F.linear(x_BSI, self.weight, bias_O)
        out_BSO = base_product((self,), x_BSI)
        return out_BSO if bias_O is None else out_BSO + bias_O

    def update(self, x_BSI: Tensor, draws: Draws | None) -> Tensor:
        """What the adapter adds to the projection."""
        # Scaled while it is narrow: in the backward, too, that is a thousandth of the result's size.
        low_BSR = F.linear(self._dropped(x_BSI, draws), self.lora_a) * self.scale
        return F.linear(low_BSR, self.lora_b)

    def _dropped(self, x_BSI: Tensor, draws: Draws | None) -> Tensor:
        if draws is None or self.rate == 0.0:
            return x_BSI
        return torch.where(self.keep(self, x_BSI, draws), x_BSI / (1.0 - self.rate), 0.0)

    @torch.no_grad()
    def _lengths(self) -> Tensor:
        weight_OI = base_weight(self, self.lora_a.dtype)
        return row_lengths(weight_OI, self.lora_a, self.lora_b, self.scale)


def project(linear: nn.Linear, x: Tensor, draws: Draws | None) -> Tensor:
    """A projection, with the dropout of its adapter if it has one."""
    out: Tensor = linear(x, draws=draws) if isinstance(linear, AdaptedLinear) else linear(x)
    return out


def row_lengths(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """The lengths of the rows of W + scale · B · A."""
    return (weight_OI + scale * (b_OR @ a_RI)).square().sum(1).sqrt()


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, magnitude_O: Tensor | None, scale: float) -> Tensor:
    """Rows of the weight that computes the same without an adapter, from the same rows of what it consists of."""
    whole_OI = weight_OI + scale * (b_OR @ a_RI)
    if magnitude_O is None:
        return whole_OI
    return whole_OI * (magnitude_O / whole_OI.square().sum(1).sqrt()).unsqueeze(1)


def _keep(linear: AdaptedLinear, x_BSI: Tensor, draws: Draws) -> Tensor:
    return keep_mask(draws.inside(), linear.rate, linear.site, x_BSI.shape[1], x_BSI.shape[2])
