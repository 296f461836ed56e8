"""Best-fit packing: which whole documents share a window, and what packing cuts off or pads. S = sequence length."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.store import Int64Array, TokenStore

BLOCK = 1 << 20
"""Documents packed at a time: far more than fit a window, few enough for memory."""


@dataclass(frozen=True)
class Packed:
    """Windows as lists of pieces: window w is made of the pieces from first_W[w] up to first_W[w + 1]."""

    starts_P: Int64Array
    lengths_P: Int64Array
    first_W: Int64Array


@dataclass(frozen=True)
class Shares:
    """What a packing costs, both between 0 and 1."""

    truncated: float
    """Tokens that are cut off from their document's beginning, of all tokens."""
    padded: float
    """Places that hold no token, of all places."""


def pack_documents(
    starts: Int64Array, stop: int, sequence_length: int, *, alone: bool = False, whole: bool = False
) -> Packed:
    """The documents that begin at the given places, the last ending at stop, in as few windows as best fit finds.

    A document longer than a window is cut every S tokens and its rest is packed. `alone` gives every document a window
    of its own instead, cut to S tokens, and sorts them by length. `whole` leaves out longer ones instead of cutting.
    """
    lengths = np.diff(np.append(starts, stop))
    if whole:
        fits = lengths <= sequence_length
        starts, lengths = starts[fits], lengths[fits]
    return pack_pieces(starts, lengths, sequence_length, alone=alone)


def pack_pieces(
    starts: Int64Array,
    lengths: Int64Array,
    sequence_length: int,
    rooms: Int64Array | None = None,
    *,
    alone: bool = False,
) -> Packed:
    """Documents as `pack_documents` packs them, or pieces none of which is cut, by the room that each needs."""
    if alone:
        order = np.argsort(lengths, kind="stable")
        return Packed(starts[order], np.minimum(lengths, sequence_length)[order], np.arange(len(starts) + 1))
    blocks = [
        _pack_block(
            starts[first : first + BLOCK],
            lengths[first : first + BLOCK],
            sequence_length,
            None if rooms is None else rooms[first : first + BLOCK],
        )
        for first in range(0, len(starts), BLOCK)
    ]
    if not blocks:
        return Packed(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1, np.int64))
    pieces = np.cumsum([0] + [len(block.starts_P) for block in blocks])
    return Packed(
        np.concatenate([block.starts_P for block in blocks]),
        np.concatenate([block.lengths_P for block in blocks]),
        np.concatenate(
            [block.first_W[:-1] + before for block, before in zip(blocks, pieces, strict=False)] + [pieces[-1:]]
        ),
    )


def running_shares(starts: Int64Array, stop: int, sequence_length: int) -> Shares:
    """What concatenating costs: what a document has beyond its first window is cut off from its beginning."""
    if len(starts) == 0:
        return Shares(0.0, 0.0)
    ends = np.append(starts[1:], stop)
    window_ends = ((starts - starts[0]) // sequence_length + 1) * sequence_length + starts[0]
    return Shares(float(np.maximum(ends - window_ends, 0).sum() / (stop - starts[0])), 0.0)


def packed_shares(packed: Packed, starts: Int64Array, stop: int, sequence_length: int) -> Shares:
    """What a packing costs; tokens that it leaves out count as cut off."""
    if len(starts) == 0:
        return Shares(0.0, 0.0)
    begun = int(packed.lengths_P[np.isin(packed.starts_P, starts)].sum())
    places = max(1, len(packed.first_W) - 1) * sequence_length
    return Shares(1 - begun / int(stop - starts[0]), 1 - int(packed.lengths_P.sum()) / places)


def document_starts(store: TokenStore, start: int, stop: int) -> Int64Array:
    """Where documents begin in a part of the store; a part that begins amid one counts as its beginning."""
    starts = store.starts_between(start, stop)
    return starts if stop <= start or (len(starts) and starts[0] == start) else np.insert(starts, 0, start)


def _pack_block(
    starts: Int64Array, lengths: Int64Array, sequence_length: int, rooms: Int64Array | None = None
) -> Packed:
    piece_starts, piece_lengths = starts, lengths
    if rooms is None:
        counts = np.maximum(-(-lengths // sequence_length), 1)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        piece_starts = np.repeat(starts, counts) + within * sequence_length
        piece_lengths = np.minimum(np.repeat(lengths, counts) - within * sequence_length, sequence_length)
    windows = _best_fit(piece_lengths if rooms is None else rooms, sequence_length)
    # Windows in the order of the text: whoever reads the first few of them sees an honest part of it.
    firsts = np.full(int(windows.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(firsts, windows, piece_starts)
    place = np.empty(len(firsts), np.int64)
    place[np.argsort(firsts, kind="stable")] = np.arange(len(firsts))
    windows = place[windows]
    order = np.lexsort((piece_starts, windows))
    first = np.searchsorted(windows[order], np.arange(len(firsts) + 1))
    return Packed(piece_starts[order], piece_lengths[order], first)


def _best_fit(lengths: Int64Array, room: int) -> Int64Array:
    """The window of each piece: longest first, each into the fullest window that still takes it.

    Pieces of one length are placed together: a window that takes one of them stays the fullest that takes the next,
    until it takes no more.
    """
    order = np.argsort(-lengths, kind="stable")
    windows = np.empty(len(lengths), np.int64)
    open_windows: dict[int, Int64Array] = {}
    open_rooms = 0  # bit r is set where windows with room r are open
    made = 0
    values, begins = np.unique(-lengths[order], return_index=True)
    for length, group in zip((-values).tolist(), np.split(order, begins[1:]), strict=True):
        while len(group):
            fitting = open_rooms >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                candidates = open_windows.pop(left)
                open_rooms &= ~(1 << left)
            else:
                left, candidates = room, made + np.arange(-(-len(group) // (room // length)))
                made += len(candidates)
            each = left // length
            used = -(-len(group) // each)
            taken, spare = candidates[:used], candidates[used:]
            placed = np.repeat(taken, each)[: len(group)]
            windows[group[: len(placed)]] = placed
            group = group[len(placed) :]
            last = len(placed) - (len(taken) - 1) * each
            for rest, whose in (
                (left - each * length, taken[:-1]),
                (left - last * length, taken[-1:]),
                (left, spare),
            ):
                if rest and len(whose):
                    known = open_windows.get(rest)
                    open_windows[rest] = whose if known is None else np.concatenate((known, whose))
                    open_rooms |= 1 << rest
    return windows
