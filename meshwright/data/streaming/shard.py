"""A virtual shard: some of the input's units read round and round, cut into blocks whose samples are shuffled.

What a block holds follows from the cursor at its beginning, so the cursor is all that must be remembered: a shuffle
buffer whose content would have to be saved with it could not be resumed exactly by other ranks. S = sequence length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.data.hashing import fraction_of, mix
from meshwright.data.order import permute
from meshwright.data.prepared.fill import JUDGED_FROM, MAX_BAD
from meshwright.data.raw import Bad, BadDocuments, Taking, Text, Unit, in_parts, read_unit
from meshwright.data.samples import Sample, masked_sample
from meshwright.data.stages import ENCODE, PACK, READ, stage
from meshwright.data.store import Int64Array
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError

_ENCODED_AT_ONCE_BYTES = 1 << 18
_DOCUMENTS, _FILES = 0x5EED_0F_D0C5, 0x5EED_0F_F11E


def held_out(unit: int, ordinal: int, file: int | None, fraction: float) -> bool:
    """Whether a document is one of validation's: by its place in a unit, since a stream is not counted before."""
    if file is not None:
        return fraction_of(file, _FILES) < fraction
    return fraction_of(ordinal, mix(unit, _DOCUMENTS)) < fraction


class Cursor(NamedTuple):
    """Where a block of a virtual shard begins."""

    block: int
    turn: int
    """Units of the shard gone through before, all rounds together."""
    item: int
    """Items of the unit gone through before."""
    used: int
    """Tokens of the item used before."""


START = Cursor(0, 0, 0, 0)


@dataclass(frozen=True)
class Recipe:
    """What the samples of every virtual shard are made by."""

    tokenizer: Tokenizer
    text_field: str
    validation_fraction: float
    sequence_length: int
    samples: int
    """Of a block."""
    mask_documents: bool
    seed: int


class _Piece(NamedTuple):
    turn: int
    item: int
    used: int
    tokens: Int64Array
    begins: bool


class VirtualShard:
    """Blocks of samples one after the other, from a cursor on."""

    def __init__(self, number: int, units: Sequence[Unit], recipe: Recipe, cursor: Cursor = START) -> None:
        self._number, self._units, self._recipe = number, list(units), recipe
        self._key = mix(number, mix(recipe.seed))
        self._next = cursor
        self._pieces = self._read_on(cursor)
        self._rest: _Piece | None = None
        self._bad, self._documents = BadDocuments(), 0
        self.cursor = cursor
        """Of the block at hand."""
        self._block: int | None = None
        self._tokens = np.empty(0, np.uint32)
        self._starts = np.empty(0, np.int64)

    def read(self, sample: int) -> Sample:
        """A sample of the shard; only those of the block at hand and of later ones can be read."""
        block, place = divmod(sample, self._recipe.samples)
        while self._block is None or self._block < block:
            with stage(READ):
                self._fill()
        window = permute(place, self._recipe.samples, mix(block, self._key))
        with stage(PACK):
            return self._cut(window * self._recipe.sequence_length)

    def _fill(self) -> None:
        """The next block: its tokens, where documents begin in them, and the cursor of the one behind it."""
        needed = self._recipe.samples * self._recipe.sequence_length + 1
        self.cursor, self._block = self._next, self._next.block
        parts, starts, count = [], [], 0
        while count < needed:
            piece = self._rest or next(self._pieces)
            self._rest = None
            taken = min(len(piece.tokens), needed - count)
            if piece.begins:
                starts.append(count)
            parts.append(piece.tokens[:taken])
            count += taken
            if count == needed:
                # The last token is this block's last label and the next one's first token.
                used = piece.used + taken - 1
                begins = piece.begins and taken == 1
                self._rest = piece._replace(used=used, tokens=piece.tokens[taken - 1 :], begins=begins)
                self._next = Cursor(self._block + 1, piece.turn, piece.item, used)
        self._tokens = np.concatenate(parts).astype(np.uint32)
        self._starts = np.array(starts, np.int64)

    def _cut(self, start: int) -> Sample:
        length = self._recipe.sequence_length
        tokens = self._tokens[start : start + length + 1].astype(np.int64)
        if not self._recipe.mask_documents:
            return Sample(tokens[:-1], tokens[1:], None, length)
        first, last = np.searchsorted(self._starts, (start + 1, start + length + 1))
        return masked_sample(tokens[:-1], tokens[1:], self._starts[first:last] - start)

    def _read_on(self, cursor: Cursor) -> Iterator[_Piece]:
        """The training tokens from a cursor on, endlessly; every round takes the units in another order."""
        turn, item, used = cursor.turn, cursor.item, cursor.used
        fruitless = 0
        while fruitless < len(self._units):
            fruitless += 1
            for number, text, tokens in self._encoded(self.unit_at(turn), item):
                if used < len(tokens):
                    fruitless = 0
                    yield _Piece(turn, number, used, np.array(tokens[used:], np.int64), text.begins and used == 0)
                used = 0
            turn, item, used = turn + 1, 0, 0
        names = ", ".join(sorted({piece.file.name for unit in self._units for piece in unit.pieces})[:3])
        raise UserError(f"data.sources: {names} hold no text to train on; put some there or remove them from the list")

    @property
    def unit(self) -> Unit:
        """The unit that the block at hand begins in."""
        return self.unit_at(self.cursor.turn)

    def unit_at(self, turn: int) -> Unit:
        """The unit of a turn."""
        round_, place = divmod(turn, len(self._units))
        return self._units[permute(place, len(self._units), mix(round_, self._key + 1))]

    def _encoded(self, unit: Unit, skip: int) -> Iterator[tuple[int, Text, list[int]]]:
        """A unit's training items with their numbers and tokens, tokenised some at a time."""
        recipe = self._recipe
        batch: list[tuple[int, Text]] = []
        size_bytes = 0
        for number, item in enumerate(read_unit(unit, Taking(recipe.text_field), skip=skip), start=skip):
            if isinstance(item, Bad):
                self._count_bad(item)
                continue
            self._documents += item.ends
            if held_out(unit.number, number, item.file, recipe.validation_fraction):
                continue
            batch.append((number, item))
            size_bytes += item.size_bytes
            if size_bytes >= _ENCODED_AT_ONCE_BYTES:
                yield from _encode(batch, recipe.tokenizer)
                batch, size_bytes = [], 0
        yield from _encode(batch, recipe.tokenizer)

    def _count_bad(self, item: Bad) -> None:
        self._bad.add(item.kind, item.place)
        seen = self._bad.count + self._documents
        if seen >= JUDGED_FROM and self._bad.against_limit > MAX_BAD * seen:
            raise UserError(
                f"data.sources: {self._bad.against_limit} of the last {seen} documents cannot be used "
                f"({self._bad.sentence()}); fix them or correct data.text_field"
            )


def _encode(batch: list[tuple[int, Text]], tokenizer: Tokenizer) -> Iterator[tuple[int, Text, list[int]]]:
    parts = [(place, part) for place, (_, text) in enumerate(batch) for part in in_parts(text)]
    tokens: list[list[int]] = [[] for _ in batch]
    with stage(ENCODE):
        found = tokenizer.encode_batch([part.text for _, part in parts])
    for (place, _), encoded in zip(parts, found, strict=True):
        tokens[place] += encoded
    for (number, text), encoded in zip(batch, tokens, strict=True):
        yield number, text, [*encoded, tokenizer.end_of_text] if text.ends else encoded
