"""Samples as pieces that fit a sequence, in tokens and in items; what does not fit is left out, refused or split."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.media.index import MediaIndex
from meshwright.data.store import Int64Array
from meshwright.errors import UserError


@dataclass(frozen=True)
class Limits:
    """What a sequence holds besides tokens."""

    index: MediaIndex
    slots: int
    """Items per sequence."""
    tokens: int
    """Tokens per item."""
    oversize: str
    """data.oversize: what becomes of a sample that does not fit."""

    @property
    def name(self) -> str:
        """Tells packings apart that are kept in one folder."""
        return f"items{self.slots}x{self.tokens}-{self.oversize}"


@dataclass(frozen=True)
class Pieces:
    """Where pieces begin, their tokens, and the share of a sequence that each needs, as if it were tokens."""

    starts: Int64Array
    lengths: Int64Array
    rooms: Int64Array
    left_out: int
    """Samples that do not fit."""
    split: int


def pieces_of(starts: Int64Array, stop: int, sequence_length: int, limits: Limits) -> Pieces:
    """The samples that begin at the given places, the last ending at stop, as pieces of at most a sequence.

    Every item takes some room, whatever its tokens, so that pieces that fit by their rooms fit by both.
    """
    places = _items(limits)
    bounds = np.append(starts, stop)
    lengths = np.diff(bounds)
    items = np.diff(np.searchsorted(places, bounds))
    fits = (lengths <= sequence_length) & (items <= limits.slots)
    wrong = np.flatnonzero(~fits)
    found_starts, found_lengths, found_items = [starts[fits]], [lengths[fits]], [items[fits]]
    if len(wrong) and limits.oversize == "refuse":
        worst = int(wrong[0])
        raise UserError(
            f"{len(wrong)} of {len(starts)} samples do not fit a sequence, the first with {lengths[worst]} tokens and "
            f"{items[worst]} items, where batch.sequence_length = {sequence_length} and data.items_per_sequence = "
            f'{limits.slots}; raise those, or set data.oversize = "leave-out" or "split"'
        )
    split = 0
    if limits.oversize == "split":
        for sample in wrong.tolist():
            first, last = int(bounds[sample]), int(bounds[sample + 1])
            own = places[np.searchsorted(places, first) : np.searchsorted(places, last)]
            cuts = np.array(_cuts(first, last, own, sequence_length, limits))
            found_starts.append(cuts[:-1])
            found_lengths.append(np.diff(cuts))
            found_items.append(np.diff(np.searchsorted(own, cuts)))
            split += 1
    all_starts = np.concatenate(found_starts)
    order = np.argsort(all_starts, kind="stable")
    piece_lengths = np.concatenate(found_lengths)[order]
    # The least room per item with which one more than the slots would not fit.
    each = sequence_length // (limits.slots + 1) + 1
    shares = np.minimum(np.concatenate(found_items)[order] * each, sequence_length)
    rooms = np.maximum(piece_lengths, shares)
    return Pieces(all_starts[order], piece_lengths, rooms, 0 if split else len(wrong), split)


def _items(limits: Limits) -> Int64Array:
    """The first token of every item, a film's frames one by one."""
    places, counts = limits.index.places_and_counts()
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Int64Array = np.repeat(places, counts) + within * limits.tokens
    return found


def _cuts(first: int, last: int, items: Int64Array, sequence_length: int, limits: Limits) -> list[int]:
    """Where a sample is cut: after at most so many tokens and items, and never within an item."""
    cuts = [first]
    while cuts[-1] < last:
        begin = cuts[-1]
        end = min(last, begin + sequence_length)
        ahead = items[np.searchsorted(items, begin) :]
        if len(ahead) > limits.slots:
            end = min(end, int(ahead[limits.slots]))
        before = ahead[ahead < end]
        if len(before) and before[-1] + limits.tokens > end and before[-1] > begin:
            end = int(before[-1])
        cuts.append(end)
    return cuts
