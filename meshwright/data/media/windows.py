"""Windows of samples with pictures, film and sound. K = slots for items, T = tokens of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.media.carried import EncodedItem
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import Damaged
from meshwright.data.media.index import ItemRow, MediaIndex
from meshwright.data.media.items import ItemMaker
from meshwright.data.packed import PackedWindows, PackIndex
from meshwright.data.samples import Sample
from meshwright.data.stages import DECODE, READ, stage
from meshwright.data.store import Int64Array, TokenStore
from meshwright.errors import UserError
from meshwright.job.fields import ItemPlan


@dataclass(frozen=True)
class Placed:
    """Some items of a picture, film or sound, and where the first of them begins in the window."""

    shard: int
    row: ItemRow
    first: int
    count: int
    place: int


@dataclass(frozen=True)
class SampleMedia:
    """The items of a window, read and decoded when they are asked for."""

    plan: ItemPlan
    index: MediaIndex
    maker: ItemMaker
    placed: tuple[Placed, ...]
    key: int | None = None
    """What chance is drawn from; None for none."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the items before they are normalised."""
        return self.maker.dtype

    @property
    def scale(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and deviation of the colours; None where items need not be normalised."""
        return self.maker.scale

    def keyed(self, key: int) -> "SampleMedia":
        """The same items, with what chance is drawn from."""
        return replace(self, key=key)

    def places_KT(self) -> Int64Array:
        """The place of every token of every item, -1 in empty slots."""
        places_KT = np.full((self.plan.slots, self.plan.tokens), -1, np.int64)
        slot = 0
        for one in self.placed:
            for item in range(one.count):
                begin = one.place + item * self.plan.tokens
                places_KT[slot] = np.arange(begin, begin + self.plan.tokens)
                slot += 1
        return places_KT

    def fill(self, items_K: NDArray[Any]) -> list[str]:
        """Decode the items into their slots, the rest of which are zero; the names of those that could not be."""
        slot, lost = 0, []
        for number, one in enumerate(self.placed):
            try:
                raw = self._bytes(one)
                with stage(DECODE):
                    made = self.maker.make(one.row.field, raw, Chance(self.key, number))
                if len(made) < one.first + one.count:
                    raise Damaged("damaged", f"gives {len(made)} items where {one.row.items} were prepared")
                items_K[slot : slot + one.count] = made[one.first : one.first + one.count]
            except Damaged as error:
                lost.append(self._lost(one, error))
            slot += one.count
        return lost

    def encoded(self, row: int) -> list[EncodedItem]:
        """The bytes of the items, for row `row` of a batch, to be decoded elsewhere; a missing file has none."""
        found, slot = [], 0
        for number, one in enumerate(self.placed):
            try:
                raw = self._bytes(one)
            except Damaged:
                raw = b""
            name = self.index.name(one.shard, one.row)
            found.append(EncodedItem(row, slot, one.row.field, raw, one.first, one.count, self.key, number, name))
            slot += one.count
        return found

    def _bytes(self, one: Placed) -> bytes:
        try:
            with stage(READ):
                return self.index.read(one.shard, one.row)
        except OSError as error:
            raise Damaged("missing", error.strerror or str(error)) from error

    def _lost(self, one: Placed, error: Damaged) -> str:
        name = self.index.name(one.shard, one.row)
        if self.maker.refuses:
            raise UserError(
                f"{name} cannot be decoded ({error}), though it was taken when it was prepared; prepare it again, or "
                'set data.damaged = "blank" to train with an empty item in its place'
            )
        return f"{name} ({error})"


class MediaWindows(PackedWindows):
    """Whole samples in windows of one length, with the items whose placeholders are in them."""

    def __init__(
        self,
        store: TokenStore,
        index: PackIndex,
        plan: ItemPlan,
        items: MediaIndex,
        maker: ItemMaker,
        sequence_length: int,
        part: int | None = None,
    ) -> None:
        super().__init__(store, index, sequence_length, True, part)
        self._plan, self._items, self._maker = plan, items, maker
        self._longest = plan.tokens * maker.most_items

    def read(self, window: int) -> Sample:
        """The window as a sample; its items are decoded later."""
        sample = super().read(window)
        starts, lengths = self.pieces(window)
        placed, begin = [], 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            for shard, row in self._items.between(start, start + length, self._longest):
                first, count = self._inside(row, start, start + length)
                if count:
                    place = begin + row.place + first * self._plan.tokens - start
                    placed.append(Placed(shard, row, first, count, place))
            begin += length
        return sample.with_media(SampleMedia(self._plan, self._items, self._maker, tuple(placed)))

    def _inside(self, row: ItemRow, start: int, stop: int) -> tuple[int, int]:
        """The first item of a row that lies wholly between two places, and how many do."""
        first = max(0, -(-(start - row.place) // self._plan.tokens))
        last = min(row.items, (stop - row.place) // self._plan.tokens)
        return first, max(0, last - first)
