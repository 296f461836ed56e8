"""The decoder: tokens in, loss or logits out, on one device. B batch, S sequence, D width, V vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model.audio import AudioTower
from meshwright.model.block import Block, ExtraBlock
from meshwright.model.cache import KVCache
from meshwright.model.documents import Documents
from meshwright.model.dropout import AFTER_EMBEDDING, Draws, dropout
from meshwright.model.encoder import Tower, placed
from meshwright.model.head import Head
from meshwright.model.media import Media
from meshwright.model.norm import RMSNorm, make_norm
from meshwright.model.preference import Pairs
from meshwright.model.rotary import RotaryTables, rotary_tables
from meshwright.model.vision import VisionTower


class Decoder(nn.Module):
    """A decoder-only transformer; a pipeline stage is the same with parts set to None or layers removed.

    For extra tokens the last stage has the embedding, too.
    """

    embed: nn.Embedding | None
    position_embed: nn.Embedding | None
    vision: VisionTower | None
    audio: AudioTower | None
    final_norm: RMSNorm | nn.LayerNorm | None
    head: Head | None
    after_block: Callable[[str, Tensor], None] | None = None
    """Called with a block's name and result; unlike a hook on the block it is not compiled with it."""
    segments: Sequence[Sequence[str]] | None = None
    """The names of blocks that `run_segment` runs together; by default each alone."""
    extra_loss: Tensor | None = None
    """The loss of extra tokens, their mean without its weight, added up over forwards until `take_extra_loss`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        learned = shape.positions == "learned"
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embed = nn.Embedding(shape.max_sequence_length, shape.width) if learned else None
        self.vision = None if shape.vision is None else VisionTower(shape, shape.vision)
        self.audio = None if shape.audio is None else AudioTower(shape, shape.audio)
        self.layers = nn.ModuleDict(
            {str(layer): (Block if layer < shape.layers else ExtraBlock)(shape, layer) for layer in range(shape.blocks)}
        )
        self.final_norm = make_norm(shape)
        self.head = Head(shape)
        self._tie()

    def _tie(self) -> None:
        if self.shape.tied and self.embed is not None and self.head is not None:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move as usual; torch splits a tied table into two when it leaves the meta device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        valid_count: Tensor | float | None = None,
        *,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        draws: Draws | None = None,
        cache: KVCache | None = None,
        routing: Mapping[int, Tensor] | None = None,
        ahead: Sequence[tuple[Tensor, Tensor]] = (),
        pairs: Pairs | None = None,
        media: Media | None = None,
    ) -> Tensor:
        """Tokens (hidden states, in a later pipeline stage) to loss or logits (hidden states where there is no head).

        positions (B, S) default to 0, 1, … or to what follows the cache; documents restrict attention
        to themselves; draws enable dropout; routing replays the choice of experts (B, S, K) of its layers. `ahead` are
        the tokens 1, 2, … places later with their labels, one pair for each of shape.extra_tokens: the gradients are
        then also those of their loss, the loss returned is the main one. With `pairs` of answers it is theirs.
        What `media` encodes to takes the places of tokens; their numbers count the hidden states that this model holds.
        """
        if cache is not None and documents is not None:
            raise ValueError("a cache holds one document a row: give either cache or documents")
        if documents is not None and x.is_cuda:
            documents = documents.bounded()  # once for all layers
        index = self._default_positions(x, cache) if positions is None else positions
        hidden_BSD, *later = self._looked_up(x, ahead)
        if not x.is_floating_point():
            if (tower := self.encoder) is not None and media is not None:
                hidden_BSD = placed(hidden_BSD, tower(media.items_BK), media)
            hidden_BSD = self._placed(hidden_BSD, index, draws)
        rotary = rotary_tables(self.shape, index, hidden_BSD.dtype) if self.shape.positions == "rope" else None
        for names in self.segments or [[name] for name in self.layers]:
            if int(names[0]) < self.shape.layers:
                hidden_BSD = self.run_segment(names, hidden_BSD, rotary, positions, documents, draws, cache, routing)
        if self.final_norm is not None:
            hidden_BSD = self.final_norm(hidden_BSD)
        if self.head is None:
            return hidden_BSD
        result: Tensor = self.head(hidden_BSD, labels, valid_count, pairs)
        if not later:
            return result
        losses = []
        for layer, (embedding_BSD, (_, labels_BS)) in enumerate(zip(later, ahead, strict=True), self.shape.layers):
            x_BSC = torch.cat((hidden_BSD, embedding_BSD), dim=-1)
            hidden_BSD = self.run_segment([str(layer)], x_BSC, rotary, positions, documents, draws, None, routing)
            losses.append(self.head(hidden_BSD, labels_BS, valid_count))
        extra = torch.stack(losses).mean()
        self.extra_loss = extra.detach() if self.extra_loss is None else self.extra_loss + extra.detach()
        # The value stays the main loss's, which other runs, models and evaluations can be compared with.
        return result + self.shape.extra_tokens_weight * (extra - extra.detach())

    @property
    def encoder(self) -> Tower | None:
        """What encodes pictures or sound, where this model or stage has it."""
        return self.vision or self.audio

    def take_extra_loss(self) -> Tensor | None:
        """What the losses of extra tokens have added up to since this was last called; None without any."""
        taken, self.extra_loss = self.extra_loss, None
        return taken

    def run_segment(
        self,
        names: Sequence[str],
        hidden_BSD: Tensor,
        rotary: RotaryTables | None,
        positions: Tensor | None,
        documents: Documents | None,
        draws: Draws | None,
        cache: KVCache | None,
        routing: Mapping[int, Tensor] | None,
    ) -> Tensor:
        """Some consecutive blocks; replaced where they are recomputed together."""
        for name in names:
            drawn = None if draws is None else draws.at_layer(int(name))
            replayed = None if routing is None else routing.get(int(name))
            hidden_BSD = self.run_block(name)(hidden_BSD, rotary, positions, documents, drawn, cache, replayed)
            if self.after_block is not None:
                self.after_block(name, hidden_BSD)
        return hidden_BSD

    def run_block(self, name: str) -> Callable[..., Tensor]:
        """What runs a block: the module itself; replaced where its hooks are not for a recomputation."""
        return self.layers[name]

    def _default_positions(self, x: Tensor, cache: KVCache | None) -> Tensor:
        first = 0 if cache is None else cache.length
        end = first + x.shape[1]
        if self.shape.positions == "learned" and end > self.shape.max_sequence_length:
            raise UserError(
                f"model.max_sequence_length = {self.shape.max_sequence_length} is shorter than the {end} tokens given, "
                "and learned positions end there; shorten the sequence or raise it"
            )
        return torch.arange(first, end, device=x.device).unsqueeze(0)

    def _looked_up(self, x: Tensor, ahead: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        """Embeddings of tokens, hidden states as they are; and in the last stage embeddings of the tokens ahead."""
        tokens = [] if x.is_floating_point() else [x]
        if self.head is not None:
            tokens += [later for later, _ in ahead]
        if not tokens:
            return [x]
        assert self.embed is not None
        # One lookup, so that a sharded table is gathered once.
        found: Sequence[Tensor] = self.embed(torch.cat(tokens) if ahead else x).chunk(len(tokens))
        return [x, *found] if x.is_floating_point() else found

    def _placed(self, hidden_BSD: Tensor, index: Tensor, draws: Draws | None) -> Tensor:
        """The embedding of tokens, with learned positions and dropout."""
        if self.position_embed is not None:
            hidden_BSD = hidden_BSD + self.position_embed(index)
        if draws is None or self.shape.dropout == 0.0:
            return hidden_BSD
        return dropout(hidden_BSD, self.shape.dropout, draws, AFTER_EMBEDDING)
