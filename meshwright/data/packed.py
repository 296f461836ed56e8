"""Packed windows: an index of whole documents, kept beside the tokens, and how a window is read by it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from meshwright.atomic import atomic_file, write_atomic
from meshwright.data.files import read_json
from meshwright.data.media.pieces import Limits, pieces_of
from meshwright.data.packing import (
    Packed,
    Shares,
    document_starts,
    pack_documents,
    pack_pieces,
    packed_shares,
    running_shares,
)
from meshwright.data.samples import IGNORE, Sample
from meshwright.data.store import Int64Array, SyntheticTokens, TokenStore, load_index
from meshwright.errors import UserError

PADDING = 0
"""The token of places that hold none: any would do, for no label is there and nothing sees it."""
_LOOKS, _LOOK_TOKENS = 64, 1 << 14
_ARRAYS = ("starts", "lengths", "first")


@dataclass(frozen=True)
class PackIndex:
    """The packed windows of every source in turn, and what packing costs."""

    packed: Packed
    bounds: tuple[int, ...]
    """The first window of each source, and the number of all."""
    shares: Shares
    running: Shares
    """What concatenating would cost."""
    left_out: int = 0
    """Samples with pictures that no window holds."""
    split: int = 0
    """Such samples that were split."""


class PackedWindows:
    """Whole documents in windows of one length; what is left of a window is padding."""

    uniform = False

    def __init__(
        self, store: TokenStore, index: PackIndex, sequence_length: int, mask_documents: bool, part: int | None = None
    ) -> None:
        self.sequence_length = sequence_length
        self.store, self._mask = store, mask_documents
        self._packed = index.packed
        self._first, self._last = (0, index.bounds[-1]) if part is None else index.bounds[part : part + 2]

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, window: int) -> Sample:
        """The window as a sample."""
        starts, lengths = self.pieces(window)
        length = int(lengths.sum())
        tokens = np.full(self.sequence_length, PADDING, np.int64)
        labels = np.full(self.sequence_length, IGNORE, np.int64)
        places = np.concatenate(([0], lengths.cumsum()))
        for start, place, stop in zip(starts.tolist(), places.tolist(), places[1:].tolist(), strict=False):
            count = stop - place + self._continues(start, stop - place)
            read = self.store.read(start, start + count)
            targets = self.store.targets(start, start + count)
            tokens[place:stop] = read[: stop - place]
            counted = read if targets is None else np.where(targets, read, IGNORE)
            labels[place : place + count - 1] = counted[1:]
            if place and not self._mask:
                labels[place - 1] = counted[0]
        if not self._mask:
            return Sample(tokens, labels, None, length)
        return Sample(tokens, labels, places[:-1] if length == self.sequence_length else places, length)

    def count_valid(self, window: int) -> int:
        """Labels of a window that count in the loss."""
        starts, lengths = self.pieces(window)
        total = 0
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            first = start + (1 if self._mask or number == 0 else 0)
            stop = start + length + self._continues(start, length)
            targets = self.store.targets(first, stop)
            total += stop - first if targets is None else int(targets.sum())
        return total

    def length(self, window: int) -> int:
        """Places of a window before the padding."""
        return int(self.pieces(window)[1].sum())

    def pieces(self, window: int) -> tuple[Int64Array, Int64Array]:
        """Where the pieces of a window begin in the store, and their lengths."""
        first, last = self._packed.first_W[self._first + window : self._first + window + 2].tolist()
        starts, lengths = self._packed.starts_P[first:last], self._packed.lengths_P[first:last]
        # The index may have been damaged where it lay, and is too large to be read through before it is used.
        whole = 0 <= first < last and len(starts) == last - first == len(lengths) and lengths.min() > 0
        if not whole or lengths.sum() > self.sequence_length or starts.min() < 0 or starts.max() >= len(self.store):
            raise UserError(
                f"the index of packed windows beside the tokens is damaged at window {self._first + window}; delete "
                "the files of its name (*.first.npy and its like) in the prepared folder, and they are rebuilt"
            )
        return starts, lengths

    def _continues(self, start: int, length: int) -> int:
        """1 where the document goes on after a piece, whose last token then has a label; only full windows cut one."""
        stop = start + length
        if length < self.sequence_length or stop >= len(self.store):
            return 0
        return 0 if len(self.store.starts_between(stop, stop + 1)) else 1


def open_packed(
    store: TokenStore,
    bounds: Sequence[int],
    packing: str,
    sequence_length: int,
    folder: Path | None,
    split: str,
    *,
    pairs: bool = False,
    limits: Limits | None = None,
) -> PackIndex:
    """The index of a store's packed windows, source by source as bounds say: from the folder, else made and kept there.

    With `pairs` every two documents are packed together, and left out if they are longer than a window. With `limits`
    documents hold items, of which a window takes only so many. Without a
    folder, or with one that cannot be written, the index is made for this process alone.
    """
    if isinstance(store, SyntheticTokens):
        raise UserError(
            f'data.packing = "{packing}" needs text with an end, which builtin:synthetic has not; name your own '
            'data.sources, or set data.packing = "concatenate"'
        )
    name = None
    if folder is not None:
        kind = f"{packing}-pairs" if pairs else packing if limits is None else f"{packing}-{limits.name}"
        name = folder / f"{split}.{kind}-{sequence_length}-{_fingerprint(store, bounds)}"
    kept = None if name is None else _read(name)
    if kept is not None:
        return kept
    made = _make(store, bounds, packing, sequence_length, pairs, limits)
    if name is not None:
        _write(name, made)
    return made


def _fingerprint(store: TokenStore, bounds: Sequence[int]) -> str:
    """Tells packed stores apart that would keep their index in one folder, by looks at where documents begin."""
    digest = hashlib.sha256(json.dumps(list(bounds)).encode())
    for look in range(_LOOKS):
        start = look * len(store) // _LOOKS
        digest.update(store.starts_between(start, start + _LOOK_TOKENS).tobytes())
    return digest.hexdigest()[:8]


def _make(
    store: TokenStore,
    bounds: Sequence[int],
    packing: str,
    sequence_length: int,
    pairs: bool,
    limits: Limits | None,
) -> PackIndex:
    alone = packing == "none"
    parts = []
    left_out = split = 0
    for start, stop in pairwise(bounds):
        starts = document_starts(store, start, stop)[:: 2 if pairs else 1]
        if limits is None:
            packed = pack_documents(starts, stop, sequence_length, alone=alone, whole=pairs)
        else:
            samples = pieces_of(starts, stop, sequence_length, limits)
            packed = pack_pieces(samples.starts, samples.lengths, sequence_length, samples.rooms, alone=alone)
            left_out, split = left_out + samples.left_out, split + samples.split
        parts.append((packed, starts, stop))
    pieces = np.cumsum([0] + [len(packed.starts_P) for packed, _, _ in parts])
    windows = np.cumsum([0] + [len(packed.first_W) - 1 for packed, _, _ in parts])
    whole = Packed(
        np.concatenate([packed.starts_P for packed, _, _ in parts]),
        np.concatenate([packed.lengths_P for packed, _, _ in parts]),
        np.concatenate(
            [packed.first_W[:-1] + before for (packed, _, _), before in zip(parts, pieces, strict=False)]
            + [pieces[-1:]]
        ),
    )
    starts, stop = np.concatenate([starts for _, starts, _ in parts]), bounds[-1]
    shares = packed_shares(whole, starts, stop, sequence_length)
    running = running_shares(starts, stop, sequence_length)
    return PackIndex(whole, tuple(windows.tolist()), shares, running, left_out, split)


def _write(name: Path, index: PackIndex) -> None:
    """Keep an index: arrays first, the facts that make it whole last; ranks that write the same do no harm."""
    arrays = (index.packed.starts_P, index.packed.lengths_P, index.packed.first_W)
    facts: dict[str, object] = {
        "bounds": index.bounds,
        "shares": asdict(index.shares),
        "running": asdict(index.running),
    }
    facts |= {"sizes": [len(array) for array in arrays], "left_out": index.left_out, "split": index.split}
    try:
        for kind, array in zip(_ARRAYS, arrays, strict=True):
            with atomic_file(Path(f"{name}.{kind}.npy"), durable=True) as draft, draft.open("wb") as stream:
                np.save(stream, array)
        write_atomic(Path(f"{name}.json"), json.dumps(facts) + "\n", durable=True)
    except OSError:
        Path(f"{name}.json").unlink(missing_ok=True)


def _read(name: Path) -> PackIndex | None:
    try:
        facts = read_json(Path(f"{name}.json"))
        arrays = [load_index(Path(f"{name}.{kind}.npy")) for kind in _ARRAYS]
        bounds = tuple(int(bound) for bound in facts["bounds"])
        whole = bounds[0] == 0 and list(bounds) == sorted(bounds) and bounds[-1] == len(arrays[2]) - 1
        if not whole or [len(array) for array in arrays] != facts["sizes"]:
            return None
        shares, running = (
            Shares(float(facts[kind]["truncated"]), float(facts[kind]["padded"])) for kind in ("shares", "running")
        )
        counts = (int(facts.get(name, 0)) for name in ("left_out", "split"))
        return PackIndex(Packed(*arrays), bounds, shares, running, *counts)
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return None
