"""Exercise 4: a linear layer cut over ranks, by columns or by rows, and the toy GPT's MLPs made of it.

The layer's contract is that of `meshwright verify --layer`: whole input in, whole output out, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from toy import ToyGPT


class ParallelLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, group: dist.ProcessGroup) -> None:
        """Make parameters for this rank's share."""
        super().__init__()
        raise NotImplementedError("exercise 4 is still to be done")

    def load_full(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep this rank's share of the whole weight (out_features, in_features) and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """The whole output for the whole input; what must travel, forward and backward?"""
        return x


def parallelise(model: ToyGPT, group: dist.ProcessGroup) -> None:
    """Replace `up` and `down` of every block's MLP by layers of yours that hold the same weights."""
    raise NotImplementedError("exercise 4 is still to be done")
