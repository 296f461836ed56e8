"""Stateless dropout: masks are hashes of where and when they are used, the same in every layout and recompute.

B batch, S sequence, D width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

AFTER_EMBEDDING, AFTER_ATTENTION, AFTER_FEEDFORWARD = 0, 1, 2
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Draws:
    """The key of this step's dropout masks; pass `step` as a tensor under torch.compile, or every step recompiles."""

    seed: int
    step: int | Tensor
    sample_ids_B: Tensor
    places: Tensor | None = None
    """Index in its sequence of every token held, (S,) or (B, S); 0, 1, … when not given. Not a document's position."""
    layer: int | Tensor = 0
    """The current layer; the decoder sets it."""
    inner_places: Tensor | None = None
    """As `places`, of the tokens inside attention and feed-forward: sequence parallelism gathers them."""

    def at_layer(self, layer: int) -> "Draws":
        """The same draws inside a layer; a tensor, because a number would make torch.compile recompile every layer."""
        return replace(self, layer=torch.tensor(layer))

    def inside(self) -> "Draws":
        """The same draws for the tokens inside attention and feed-forward."""
        return replace(self, places=self.inner_places)


def dropout(x_BSD: Tensor, rate: float, draws: Draws, site: int) -> Tensor:
    """Zero a share `rate` of x and scale up the rest; only the boolean mask is kept for the backward."""
    keep = keep_mask(draws, rate, site, x_BSD.shape[1], x_BSD.shape[2])
    return torch.where(keep, x_BSD / (1.0 - rate), 0.0)


def keep_mask(draws: Draws, rate: float, site: int, sequence: int, width: int) -> Tensor:
    """The boolean (B, S, D) mask of what is kept, by hash of (seed, step, layer, site, sample, place, channel)."""
    device = draws.sample_ids_B.device
    places = torch.arange(sequence, device=device) if draws.places is None else draws.places
    # Layer and step may be numbers or tensors: both give the same integers.
    layer, step = torch.as_tensor(draws.layer), torch.as_tensor(draws.step)
    row_BS = _hash_rows(draws.seed & _LOW, draws.seed >> 32 & _LOW, layer, site, step, draws.sample_ids_B, places)
    hash_BSD: Tensor = _mix(row_BS.unsqueeze(-1) ^ torch.arange(width, device=device))
    return hash_BSD >= round(rate * 2**32)


# A custom operation, which the compiler calls without tracing into it: from a chain of mixes, each of which uses its
# input twice, it builds an expression that doubles with every one of them, and takes minutes.
@torch.library.custom_op("meshwright::hash_rows", mutates_args=())
def _hash_rows(
    seed_low: int, seed_high: int, layer: Tensor, site: int, step: Tensor, sample_ids_B: Tensor, places: Tensor
) -> Tensor:
    key: Any = 0
    for word in (seed_low, seed_high, layer, site, step):
        key = _mix(word ^ key)
    sample = sample_ids_B.unsqueeze(-1)
    row_BS: Tensor = _mix(_mix(_mix(sample & _LOW ^ key) ^ (sample >> 32 & _LOW)) ^ places)
    return row_BS


@_hash_rows.register_fake
def _(
    seed_low: int, seed_high: int, layer: Tensor, site: int, step: Tensor, sample_ids_B: Tensor, places: Tensor
) -> Tensor:
    return sample_ids_B.new_empty(sample_ids_B.shape[0], places.shape[-1])


def _mix(word: Any) -> Any:
    """A bijection of 32-bit integers (numbers or tensors) with full avalanche, in signed 64 bits without overflow."""
    word = word & _LOW
    word = word ^ word >> 16
    word = word * 0x7FEB352D & _LOW
    word = word ^ word >> 15
    word = word * (0x846CA68B - 2**32) & _LOW  # the same product modulo 2³², and below 2⁶³ in size
    return word ^ word >> 16
