"""Multi-head attention with its projections. B batch, S sequence, D width, H heads, K kv heads, E head_dim."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.adapter import project
from meshwright.model.attend import Attend, CausalAttend
from meshwright.model.cache import KVCache
from meshwright.model.documents import Documents
from meshwright.model.dropout import Draws
from meshwright.model.fused import fused_projections
from meshwright.model.norm import RMSNorm
from meshwright.model.rotary import RotaryTables, apply_rotary
from meshwright.model.sinks import Sinks


class Attention(nn.Module):
    """Project, optionally norm, rotate every head, attend, project back; `attend` may be replaced."""

    fused = False
    """Whether q, k and v are one product."""
    joined: Tensor | None = None
    """Their weights side by side, if they lie so in memory."""

    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        heads_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.layer = layer
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.width, heads_width, bias=shape.qkv_bias)
        self.k = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.v = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.o = nn.Linear(heads_width, shape.width, bias=shape.linear_bias)
        self.norm_over = shape.qk_norm_over
        normed = (heads_width, kv_width) if self.norm_over == "width" else (shape.head_dim, shape.head_dim)
        self.q_norm = RMSNorm(normed[0], shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(normed[1], shape.norm_eps) if shape.qk_norm else None
        self.sinks = Sinks(shape.heads) if shape.sinks else None
        self.attend: Attend = CausalAttend(shape.window(layer))

    def fused_linears(self) -> list[nn.Linear]:
        """The projections that may be one product."""
        return [self.q, self.k, self.v]

    @property
    def fused_away(self) -> int:
        """Projections that are part of another's product."""
        return 2 if self.fused else 0

    def forward(
        self,
        x_BSD: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        cache: KVCache | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        # The number of heads is taken from the projections' results: a tensor-parallel rank holds fewer.
        linears = self.fused_linears()
        projected: Sequence[Any]
        if self.fused:
            projected = fused_projections(x_BSD, linears, draws, self.joined)
        else:
            projected = [project(linear, x_BSD, draws) for linear in linears]
        if self.q_norm is not None and self.k_norm is not None and self.norm_over == "width":
            projected = [self.q_norm(projected[0]), self.k_norm(projected[1]), projected[2]]
        q_BSHE, k_BSKE, v_BSKE = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.fused and rotary is not None and self.q_norm is None:
            v_BSKE = v_BSKE.contiguous()  # as a part of the product it would keep all of it, which nothing else needs
        if self.q_norm is not None and self.k_norm is not None and self.norm_over == "heads":
            q_BSHE, k_BSKE = self.q_norm(q_BSHE), self.k_norm(k_BSKE)
        if rotary is not None:
            q_BSHE, k_BSKE = apply_rotary(q_BSHE, rotary), apply_rotary(k_BSKE, rotary)
        if cache is not None:
            k_BSKE, v_BSKE = cache.append(self.layer, k_BSKE, v_BSKE)
        sinks = () if self.sinks is None else (self.sinks(),)
        out_BSHE, _ = self.attend(q_BSHE, k_BSKE, v_BSKE, positions, documents, *sinks)
        return project(self.o, out_BSHE.flatten(-2), draws)
