"""Working weights whose products are one lie side by side in memory, so that the product reads them as they are."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward


def join_working_weights(model: nn.Module, working: Mapping[nn.Parameter, Tensor]) -> None:
    """Move the working copies of each fused product's weights into one tensor, of which they become views.

    Without it a product concatenates them in the forward and keeps that for its backward, 9 GB of an 8B model. Masters
    stay where they are; nothing may give the copies other memory afterwards.
    """
    copies = set(working.values())
    for module in model.modules():
        if not isinstance(module, Attention | FeedForward) or not module.fused:
            continue
        linears = module.fused_linears()
        if all(type(linear) is nn.Linear and linear.weight in copies for linear in linears) and len(linears) > 1:
            module.joined = torch.cat([linear.weight.detach() for linear in linears])
            parts = torch.split(module.joined, [linear.out_features for linear in linears])
            for linear, part in zip(linears, parts, strict=True):
                linear.weight.data = part
