"""The toy GPT of the exercises: single-device code, in the size of a classroom, with texts of unequal length."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH, STEPS, RATE = 31, 16, 2, 2, 12, 4, 3, 0.5
IGNORED = -100
Batch = tuple[Tensor, Tensor]
"""Tokens and labels, both (BATCH, SEQUENCE); a label of IGNORED does not count."""


class MLP(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(WIDTH, 4 * WIDTH)
        self.down: nn.Module = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Causal attention, then the MLP, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y


class ToyGPT(nn.Module):
    """Tokens in, the SUM of the losses of all labels that count out: who divides by what is part of the exercise."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def toy_gpt() -> ToyGPT:
    """The same weights every time, in float64."""
    torch.manual_seed(0)
    return ToyGPT().double()


def toy_batches() -> Iterator[Batch]:
    """STEPS batches; in the first half of each most labels do not count."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[: BATCH // 2, SEQUENCE // 4 :] = IGNORED
        yield tokens[:, :-1], labels
