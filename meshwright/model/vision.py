"""A vision transformer: patches of a picture as tokens, and positions. Letters as in `encoder`; C channels, Y and X
pixels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.job.vision import CHANNELS, Vision
from meshwright.model.encoder import Table, Tower
from meshwright.model.numbers import wide_dtype
from meshwright.model.router import as_it_is


class VisionTower(Tower):
    """The encoder of pictures up to its selected block, and the projector.

    Pictures are whole numbers of 0 … 255 or already normalised.
    """

    def __init__(self, shape: Model, vision: Vision) -> None:
        super().__init__(shape, vision)
        self.vision = vision
        clip = vision.kind == "clip"
        self.patch = Patches(vision)
        self.class_token = Table(vision.width) if clip else None
        self.positions = Table(vision.computed, vision.width)
        self.pre_norm = nn.LayerNorm(vision.width, eps=vision.norm_eps) if clip else None

    def embedded(self, items_N: Tensor) -> Tensor:
        """Patches with positions; CLIP's class token is the first of them."""
        x_NPW: Tensor = self.patch(_normalised(items_N, self.vision, self.patch.weight.dtype))
        if self.class_token is not None:
            x_NPW = torch.cat((self.class_token().expand(x_NPW.shape[0], 1, -1), x_NPW), dim=1)
        x_NPW = x_NPW + self.positions()
        return x_NPW if self.pre_norm is None else self.pre_norm(x_NPW)


class Patches(nn.Module):
    """Every patch of a picture as one token: a convolution whose stride is its size, as one product."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.size = vision.patch
        self.weight = nn.Parameter(torch.empty(vision.width, CHANNELS, vision.patch, vision.patch))
        self.bias = None if vision.kind == "clip" else nn.Parameter(torch.empty(vision.width))
        self.own: Callable[[Tensor], Tensor] = as_it_is

    def forward(self, x_NCYX: Tensor) -> Tensor:
        size, (_, _, height, width) = self.size, x_NCYX.shape
        by_patch = x_NCYX.view(-1, CHANNELS, height // size, size, width // size, size)
        patches = by_patch.permute(0, 2, 4, 1, 3, 5)
        bias = None if self.bias is None else self.own(self.bias)
        return F.linear(patches.flatten(3).flatten(1, 2), self.own(self.weight).flatten(1), bias)


def _normalised(items: Tensor, vision: Vision, dtype: torch.dtype) -> Tensor:
    if items.is_floating_point():
        return items.to(dtype)
    wide = wide_dtype(dtype)  # 16 bits would round a difference of numbers that are nearly equal
    centre, width = (items.new_tensor(each, dtype=wide).view(-1, 1, 1) for each in vision.colours)
    return ((items.to(wide) / 255 - centre) / width).to(dtype)
