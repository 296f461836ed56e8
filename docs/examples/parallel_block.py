"""A model of one's own: attention and feed-forward side by side on one norm, squared ReLU, no gate.

Single-device code and a table. `meshwright verify JOB` proves every layout of it, `meshwright train JOB` trains it.
"""

import torch
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model import CausalAttend, Documents, Draws
from meshwright.model.head import Head
from meshwright.model.norm import RMSNorm
from meshwright.model.rotary import apply_rotary, rotary_tables

SHARDING = {
    "embed": "vocabulary",
    "layers.*.norm": "norm",
    "layers.*.mix": "gather",
    "layers.*.mix.q": "column",
    "layers.*.mix.k": "kv-column",
    "layers.*.mix.v": "kv-column",
    "layers.*.mix.o": "row",
    "layers.*.mix.up": "column",
    "layers.*.mix.down": "row",
    "final_norm": "norm",
    "head": "head",
}


class Mix(nn.Module):
    """Attention plus feed-forward of the same input."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.down = nn.Linear(shape.ffn_width, shape.width, bias=False)
        self.attend = CausalAttend()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], documents: Documents | None) -> Tensor:
        # Heads are counted from the projections' results (-1): a rank may hold only some of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        out, _ = self.attend(apply_rotary(q, rotary), apply_rotary(k, rotary), v, None, documents)
        return self.o(out.flatten(-2)) + self.down(torch.relu(self.up(x)).square())


class Block(nn.Module):
    """x + mix(norm(x))."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.mix = Mix(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], documents: Documents | None) -> Tensor:
        return x + self.mix(self.norm(x), rotary, documents)


class ParallelBlockModel(nn.Module):
    """Tokens in, loss (or logits) out; blocks live in a ModuleDict named layers.

    A pipeline stage is this class with pieces set to None: hidden states come in or go out where they are missing.
    """

    embed: nn.Embedding | None
    final_norm: RMSNorm | None
    head: Head | None

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleDict({str(layer): Block(shape) for layer in range(shape.layers)})
        self.final_norm = RMSNorm(shape.width, shape.norm_eps)
        self.head = Head(shape)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        valid_count: Tensor | int | None = None,
        *,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device).unsqueeze(0) if positions is None else positions
        if self.embed is not None:
            x = self.embed(x)
        rotary = rotary_tables(self.shape, index, x.dtype)
        for block in self.layers.values():
            x = block(x, rotary, documents)
        if self.head is None or self.final_norm is None:
            return x
        return self.head(self.final_norm(x), labels, valid_count)


def build(shape: Model) -> nn.Module:
    """What the job's [model] section describes."""
    return ParallelBlockModel(shape)
