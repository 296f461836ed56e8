"""One transformer block, and one that predicts a further token. B batch, S sequence, D width, C = 2 · D."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.adapter import adapt
from meshwright.model.attention import Attention
from meshwright.model.cache import KVCache
from meshwright.model.documents import Documents
from meshwright.model.dropout import AFTER_ATTENTION, AFTER_FEEDFORWARD, Draws, dropout
from meshwright.model.feedforward import FeedForward
from meshwright.model.latent import LatentAttention
from meshwright.model.moe import MixtureOfExperts
from meshwright.model.norm import make_norm
from meshwright.model.rotary import RotaryTables
from meshwright.model.router import as_it_is


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream and added back to it."""

    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = make_norm(shape)
        self.attention = (
            Attention(shape, layer) if shape.latent is None else LatentAttention(shape, shape.latent, layer)
        )
        self.ffn_norm = make_norm(shape)
        experts = shape.experts if shape.has_experts(layer) else None
        self.ffn = FeedForward(shape) if experts is None else None
        self.moe = None if experts is None else MixtureOfExperts(shape, experts)
        self.shared = None if experts is None or not experts.shared_width else FeedForward(shape, experts.shared_width)
        adapt(self, shape, layer)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        draws: Draws | None = None,
        cache: KVCache | None = None,
        replayed_BSK: Tensor | None = None,
    ) -> Tensor:
        x_BSD, normed_BSD = self.attended(x_BSD, rotary, positions, documents, draws, cache)
        return x_BSD + self._drop(self._fed_forward(normed_BSD, replayed_BSK, draws), draws, AFTER_FEEDFORWARD)

    def attended(
        self,
        x_BSD: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None,
        documents: Documents | None,
        draws: Draws | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and normed for the feed-forward."""
        mixed_BSD = self.attention(self.attention_norm(x_BSD), rotary, positions, documents, cache, draws)
        x_BSD = x_BSD + self._drop(mixed_BSD, draws, AFTER_ATTENTION)
        return x_BSD, self.ffn_norm(x_BSD)

    def _fed_forward(self, x_BSD: Tensor, replayed_BSK: Tensor | None, draws: Draws | None) -> Tensor:
        if self.moe is None:
            assert self.ffn is not None
            out_BSD: Tensor = self.ffn(x_BSD, draws)
            return out_BSD
        if (shared := self.shared) is None:
            routed_BSD: Tensor = self.moe(x_BSD, replayed_BSK)
            return routed_BSD
        found: list[Tensor] = []
        routed_BSD = self.moe(x_BSD, replayed_BSK, lambda: found.append(shared(x_BSD, draws)))
        return routed_BSD + found[0]

    def _drop(self, x_BSD: Tensor, draws: Draws | None, site: int) -> Tensor:
        if draws is None or self.dropout == 0.0:
            return x_BSD
        return dropout(x_BSD, self.dropout, draws, site)


class ExtraBlock(Block):
    """A block after the last one, for multi-token prediction: it gets hidden states side by side with the embedding of
    a later token, and its result, normed, is for the head (DeepSeek-V3's report, section 2.2)."""

    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__(shape, layer)
        self.hidden_norm = make_norm(shape)
        self.embedding_norm = make_norm(shape)
        self.joined = StreamLinear(2 * shape.width, shape.width)
        self.output_norm = make_norm(shape)

    def forward(
        self,
        x_BSC: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        draws: Draws | None = None,
        cache: KVCache | None = None,
        replayed_BSK: Tensor | None = None,
    ) -> Tensor:
        hidden_BSD, embedding_BSD = x_BSC.chunk(2, dim=-1)
        # The embedding comes first in the projection: as published weights have it, not as the report writes it.
        normed = (self.embedding_norm(embedding_BSD), self.hidden_norm(hidden_BSD))
        x_BSD = self.joined(torch.cat(normed, dim=-1))
        after_BSD = super().forward(x_BSD, rotary, positions, documents, draws, cache, replayed_BSK)
        out_BSD: Tensor = self.output_norm(after_BSD)
        return out_BSD


class StreamLinear(nn.Linear):
    """A projection of the residual stream, token by token, that no rank holds only a part of."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.own: Callable[[Tensor], Tensor] = as_it_is
        """The weight as this rank computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.own(self.weight))
