"""Multi-head latent attention (DeepSeek, arXiv:2405.04434): keys and values of all heads from one vector per token.

B batch, S sequence, D width, H heads, E head_dim (queries and keys), R its rotated part, V value_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Latent, Model
from meshwright.model.adapter import project
from meshwright.model.attend import Attend, CausalAttend
from meshwright.model.cache import KVCache
from meshwright.model.documents import Documents
from meshwright.model.dropout import Draws
from meshwright.model.norm import RMSNorm
from meshwright.model.rotary import RotaryTables, apply_rotary, score_scale

_EPS = 1e-6
"""Of the norms on the vectors, whatever model.norm_eps is."""


class LatentAttention(nn.Module):
    """Project down and up again, rotate a part of every head, attend, project back; `attend` may be replaced.

    The rotated part of the key is projected from the residual stream and is the same for all heads.
    """

    def __init__(self, shape: Model, latent: Latent, layer: int) -> None:
        super().__init__()
        heads_width, unrotated = shape.heads * shape.head_dim, shape.head_dim - latent.rope_dim
        self.layer, self.head_dim, self.unrotated, self.value_dim = layer, shape.head_dim, unrotated, latent.value_dim
        self.q_down = None if latent.q_rank is None else nn.Linear(shape.width, latent.q_rank, bias=False)
        self.q_down_norm = None if latent.q_rank is None else RMSNorm(latent.q_rank, _EPS)
        self.q = nn.Linear(latent.q_rank or shape.width, heads_width, bias=False)
        self.kv_down = nn.Linear(shape.width, latent.kv_rank, bias=False)
        self.kv_down_norm = RMSNorm(latent.kv_rank, _EPS)
        self.kv = nn.Linear(latent.kv_rank, shape.heads * (unrotated + latent.value_dim), bias=False)
        self.k_rope = nn.Linear(shape.width, latent.rope_dim, bias=False)
        self.o = nn.Linear(shape.heads * latent.value_dim, shape.width, bias=False)
        self.score_scale = score_scale(shape)
        self.attend: Attend = CausalAttend(shape.window(layer))

    def forward(
        self,
        x_BSD: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        cache: KVCache | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        assert rotary is not None
        # The number of heads is taken from the projections' results: a tensor-parallel rank holds fewer.
        down = x_BSD
        if self.q_down is not None and self.q_down_norm is not None:
            down = self.q_down_norm(project(self.q_down, x_BSD, draws))
        q_BSHE = torch.unflatten(project(self.q, down, draws), -1, (-1, self.head_dim))
        kv_low = self.kv_down_norm(project(self.kv_down, x_BSD, draws))
        kv_BSHE = torch.unflatten(project(self.kv, kv_low, draws), -1, (-1, self.unrotated + self.value_dim))
        k_BSHE, v_BSHV = torch.split(kv_BSHE, [self.unrotated, self.value_dim], dim=-1)
        q_BSHR = apply_rotary(q_BSHE[..., self.unrotated :], rotary, interleaved=True)
        k_BS1R = apply_rotary(project(self.k_rope, x_BSD, draws).unsqueeze(-2), rotary, interleaved=True)
        q_BSHE = torch.cat((q_BSHE[..., : self.unrotated], q_BSHR), dim=-1)
        k_BSHE = torch.cat((k_BSHE, k_BS1R.expand(-1, -1, k_BSHE.shape[2], -1)), dim=-1)
        if self.score_scale != 1.0:
            q_BSHE = q_BSHE * self.score_scale
        # Kernels want values as wide as keys: what zeros add to them is cut off again.
        v_BSHE = F.pad(v_BSHV, (0, self.head_dim - self.value_dim))
        if cache is not None:
            k_BSHE, v_BSHE = cache.append(self.layer, k_BSHE, v_BSHE)
        out_BSHE, _ = self.attend(q_BSHE, k_BSHE, v_BSHE, positions, documents)
        return project(self.o, out_BSHE[..., : self.value_dim].flatten(-2), draws)
