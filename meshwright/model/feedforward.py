"""The feed-forward half of a block. B batch, S sequence, D width, F ffn width."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.adapter import project
from meshwright.model.dropout import Draws
from meshwright.model.fused import fused_product
from meshwright.model.quantised_linear import storage_of
from meshwright.model.swiglu import swiglu, swiglu_down


class FeedForward(nn.Module):
    """down(silu(gate(x)) × up(x)), or down(gelu(up(x))) with the tanh approximation when there is no gate."""

    fused = False
    """Whether gate and up are one product."""
    joined: Tensor | None = None
    """Their weights side by side, if they lie so in memory."""

    def __init__(self, shape: Model, ffn_width: int | None = None) -> None:
        super().__init__()
        gated, inner = shape.activation == "swiglu", ffn_width or shape.ffn_width
        self.gate = nn.Linear(shape.width, inner, bias=shape.linear_bias) if gated else None
        self.up = nn.Linear(shape.width, inner, bias=shape.linear_bias)
        self.down = nn.Linear(inner, shape.width, bias=shape.linear_bias)

    def fused_linears(self) -> list[nn.Linear]:
        """The projections that may be one product."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    @property
    def fused_away(self) -> int:
        """Projections that are part of another's product."""
        return 1 if self.fused and self.gate is not None else 0

    def forward(self, x_BSD: Tensor, draws: Draws | None = None) -> Tensor:
        if self.gate is None:
            inner_BSF = F.gelu(project(self.up, x_BSD, draws), approximate="tanh")
        elif self.fused:
            gate_up = fused_product(x_BSD, self.fused_linears(), draws, self.joined)
            if self._has_plain_down():
                out_BSD = swiglu_down(gate_up, self.down.weight)
                return out_BSD if self.down.bias is None else out_BSD + self.down.bias
            inner_BSF = swiglu(gate_up)
        else:
            inner_BSF = F.silu(project(self.gate, x_BSD, draws)) * project(self.up, x_BSD, draws)
        return project(self.down, inner_BSF, draws)

    def _has_plain_down(self) -> bool:
        """Whether down is a trained matrix and nothing else: no adapter, no storage in fewer bits, no fp8."""
        return type(self.down) is nn.Linear and self.down.weight.requires_grad and storage_of(self.down) is None
