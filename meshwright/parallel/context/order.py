"""Which tokens each context-parallel rank holds, and which of them see which. B batch, S sequence, L = S / ranks.

The sequence is split into 2 · ranks chunks and rank r holds chunks r and 2 · ranks - 1 - r: one early and one late, so
that every rank has the same number of query-key pairs under the causal triangle.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model import Documents


def zigzag_places(sequence: int, rank: int, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """The indices in the whole sequence of the tokens that `rank` holds, ascending."""
    chunk, rest = divmod(sequence, 2 * ranks)
    if rest:
        raise UserError(
            f"batch.sequence_length = {sequence} does not divide into {2 * ranks} equal chunks, two for each of "
            f"layout.cp = {ranks} ranks; make it a multiple of {2 * ranks}"
        )
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + rank * chunk, inside + (2 * ranks - 1 - rank) * chunk])


@dataclass(frozen=True)
class Block:
    """Some of a rank's queries over some of another rank's keys, and what each query sees of them.

    A query sees the keys from its entry of `first_BQ` (from the beginning, where None) up to its own position.
    """

    queries: slice
    """Which of the rank's own tokens."""
    keys: slice
    """Which of the other rank's tokens."""
    places_Q: Tensor
    places_T: Tensor
    first_BQ: Tensor | None
    diagonal: bool
    """Queries and keys are the same tokens; in every other block all keys come before all queries."""
    windowed: bool
    """`first_BQ` follows a sliding window, not documents alone."""
    at_most: int | None
    """At most this many documents, as in Documents."""

    def visible(self, rows: slice) -> Tensor:
        """Which keys these rows of the block's queries see, (1 or B, rows, T) booleans."""
        visible = (self.places_T <= self.places_Q[rows, None])[None]
        return visible if self.first_BQ is None else visible & (self.places_T >= self.first_BQ[:, rows, None])


@dataclass(frozen=True)
class Order:
    """One rank's place in the zigzag order, and the first key that each of its queries may see."""

    rank: int
    ranks: int
    sequence: int
    first_BL: Tensor | None
    windowed: bool
    at_most: int | None
    device: torch.device

    def sources(self) -> list[int]:
        """Whose keys arrive, step by step, as they move from each rank to the next; the rank's own come first."""
        return [(self.rank - step) % self.ranks for step in range(self.ranks)]

    def block(self, source: int) -> Block:
        """What is left of the causal triangle between this rank's queries and `source`'s keys: equal work for all.

        An earlier rank's late chunk is after both chunks here, and a later rank's both chunks are after the early one.
        """
        half, everything = self.sequence // (2 * self.ranks), slice(None)
        queries = slice(half, None) if source > self.rank else everything
        keys = slice(None, half) if source < self.rank else everything
        return Block(
            queries,
            keys,
            zigzag_places(self.sequence, self.rank, self.ranks, self.device)[queries],
            zigzag_places(self.sequence, source, self.ranks, self.device)[keys],
            None if self.first_BL is None else self.first_BL[:, queries],
            source == self.rank,
            self.windowed,
            self.at_most,
        )


def order_of(
    rank: int, ranks: int, sequence: int, documents: Documents | None, window: int | None, device: torch.device
) -> Order:
    """The order of one rank; `documents` are those of the whole sequence."""
    places = zigzag_places(sequence, rank, ranks, device)
    windowed = window is not None and window < sequence
    first_BL: Tensor | None = None
    if documents is not None:
        first_BL = _document_starts(documents.ids_BS)[:, places]
    if window is not None and windowed:
        within = (places - window + 1).clamp(min=0)[None]
        first_BL = within if first_BL is None else torch.maximum(first_BL, within)
    return Order(rank, ranks, sequence, first_BL, windowed, documents.at_most if documents else None, device)


def _document_starts(ids_BS: Tensor) -> Tensor:
    """The index at which each token's document begins."""
    index = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    begins = torch.ones_like(ids_BS, dtype=torch.bool)
    begins[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return torch.where(begins, index, 0).cummax(dim=1).values
