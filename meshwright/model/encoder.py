"""What encoders of pictures and of sound have in common: items in, tokens for the decoder out.

B sequences, K slots for items, N = B · K, T tokens of an item, P of them inside the encoder, W its width, D the
decoder's width, H heads, E head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.job.encoder import ENCODERS, Encoder
from meshwright.model.media import Media
from meshwright.model.router import as_it_is


class Tower(nn.Module, ABC):
    """An encoder and the projector to the decoder's width; what comes before the blocks is each encoder's own."""

    def __init__(self, shape: Model, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.layers = nn.ModuleDict({str(layer): EncoderBlock(encoder) for layer in range(encoder.layers)})
        self.post_norm = nn.LayerNorm(encoder.width, eps=encoder.norm_eps)
        self.projector = Projector(encoder.width, shape.width)

    def forward(self, items_BK: Tensor) -> Tensor:
        """Items (B, K, the size of one) to (B, K, T, D) tokens."""
        out_NTD: Tensor = self.projector(self.encoded(items_BK.flatten(0, 1)))
        return out_NTD.view(*items_BK.shape[:2], *out_NTD.shape[1:])

    def encoded(self, items_N: Tensor) -> Tensor:
        """What the projector gets of some items."""
        x_NPW = self.embedded(items_N)
        for layer in range(self.encoder.used_layers):
            x_NPW = self.layers[str(layer)](x_NPW)
        if self.encoder.last_norm:
            x_NPW = self.post_norm(x_NPW)
        # Tokens that are the encoder's own come first.
        own = self.encoder.computed - self.encoder.tokens
        return x_NPW[:, own:] if own else x_NPW

    @abstractmethod
    def embedded(self, items_N: Tensor) -> Tensor:
        """Items as the first block takes them, (N, P, W)."""


class Table(nn.Module):
    """Numbers that are added to what is computed, or put before it; no rank holds only a part of them."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*size))
        self.own: Callable[[Tensor], Tensor] = as_it_is
        """The numbers as this rank computes with them."""

    def forward(self) -> Tensor:
        return self.own(self.weight)


class EncoderBlock(nn.Module):
    """Attention of every token of an item to all of them, and a feed-forward, each on a normed copy and added."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(encoder.width, eps=encoder.norm_eps)
        self.attention = EncoderAttention(encoder)
        self.ffn_norm = nn.LayerNorm(encoder.width, eps=encoder.norm_eps)
        self.ffn = EncoderFeedForward(encoder)

    def forward(self, x_NPW: Tensor) -> Tensor:
        x_NPW = x_NPW + self.attention(self.attention_norm(x_NPW))
        out_NPW: Tensor = x_NPW + self.ffn(self.ffn_norm(x_NPW))
        return out_NPW


class EncoderAttention(nn.Module):
    """Attention without a mask."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.head_dim = encoder.width // encoder.heads
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(encoder.width, encoder.width, bias=name != "k" or encoder.key_bias))

    def forward(self, x_NPW: Tensor) -> Tensor:
        # The number of heads is taken from the projections' results: a tensor-parallel rank holds fewer.
        heads = [self.get_submodule(name)(x_NPW).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv"]
        out_NHPE = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        out_NPW: Tensor = self.get_submodule("o")(out_NHPE.transpose(1, 2).flatten(-2))
        return out_NPW


class EncoderFeedForward(nn.Module):
    """down(act(up(x))); the quick GELU is x · σ(1.702 x)."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.activation = encoder.activation
        self.up = nn.Linear(encoder.width, encoder.ffn_width)
        self.down = nn.Linear(encoder.ffn_width, encoder.width)

    def forward(self, x_NPW: Tensor) -> Tensor:
        inner = self.up(x_NPW)
        if self.activation == "quick-gelu":
            inner = inner * torch.sigmoid(1.702 * inner)
        else:
            inner = F.gelu(inner, approximate="tanh" if self.activation == "gelu-tanh" else "none")
        out_NPW: Tensor = self.down(inner)
        return out_NPW


class Projector(nn.Module):
    """LLaVA 1.5's: two layers with the exact GELU between them."""

    def __init__(self, width: int, decoder_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, decoder_width)
        self.down = nn.Linear(decoder_width, decoder_width)

    def forward(self, x_NTW: Tensor) -> Tensor:
        out_NTD: Tensor = self.down(F.gelu(self.up(x_NTW)))
        return out_NTD


def placed(hidden_BSD: Tensor, tokens_BKTD: Tensor, media: Media) -> Tensor:
    """Hidden states with the tokens of items at their places; what has no place is dropped."""
    batch, length, _ = hidden_BSD.shape
    rows_B11 = torch.arange(batch, device=hidden_BSD.device).view(-1, 1, 1) * length
    # One more row takes what has no place: shapes stay the same whatever the batch, and nothing waits for a count.
    index = torch.where(media.places_BKT < 0, batch * length, media.places_BKT + rows_B11).flatten()
    rows = F.pad(hidden_BSD.flatten(0, 1), (0, 0, 0, 1))
    return rows.index_put((index,), tokens_BKTD.flatten(0, 2).to(rows.dtype))[:-1].view_as(hidden_BSD)


def encoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model's encoder that are computed; none on a stage or in a model without one."""
    towers = [tower for section in ENCODERS if isinstance(tower := getattr(model, section, None), Tower)]
    return [tower.layers[str(layer)] for tower in towers for layer in range(tower.encoder.used_layers)]


def is_unused(shape: Model, parameter: str) -> bool:
    """Whether nothing computes with a parameter: blocks after the selected one, and a norm after the last that is only
    a part of a folder's weights."""
    encoder = shape.encoder
    if encoder is None or not parameter.startswith(f"{encoder.section}."):
        return False
    _, module, *inside = parameter.split(".")
    if module == "post_norm":
        return not encoder.last_norm
    return module == "layers" and int(inside[0]) >= encoder.used_layers
