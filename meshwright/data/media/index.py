"""Where the items of prepared samples are: a table beside the tokens, and bytes out of the files it points to.

A row of the table is a picture, film or sound: the token it begins at, the items it becomes, its file (the number of an
input, or one of the two below), the offset and size of its bytes there, and its field.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.data.media.files import MediaFiles, SourceFile
from meshwright.data.store import Int64Array, load_index, write_index
from meshwright.errors import UserError

COPIED, NAMED = -1, -2
"""Bytes that were copied next to the tokens, since their file cannot be read from the middle; or the path of a file."""
ITEMS, COPIES = "items.npy", "media.bin"
"""Endings of a shard's files."""
_COLUMNS = 6


class ItemRow(NamedTuple):
    """A picture, film or sound of the tokens."""

    place: int
    """The first of its tokens."""
    items: int
    """Items that it becomes."""
    file: int
    offset: int
    size: int
    field: int


class ItemWriter:
    """Writes the table of one split, and the bytes that are copied."""

    def __init__(self, folder: Path, split: str) -> None:
        self._path = folder / f"{split}.{ITEMS}"
        self._copies = (folder / f"{split}.{COPIES}").open("wb")
        self._rows = array("q")

    def add(self, row: ItemRow) -> None:
        """One more, in the order of the tokens."""
        self._rows.extend(row)

    def copy(self, raw: bytes) -> int:
        """Keep bytes; where they are."""
        offset = self._copies.tell()
        self._copies.write(raw)
        return offset

    def finish(self) -> None:
        """Bring both files to the disk."""
        write_index(self._path, self._rows)
        self._copies.flush()
        self._copies.close()

    def close(self) -> None:
        """Let go of the file."""
        self._copies.close()


@dataclass(frozen=True)
class ShardItems:
    """The table of one shard, whose tokens begin at some place of the whole."""

    folder: Path
    name: str
    first: int
    files: Sequence[SourceFile]
    """The inputs that numbers stand for."""

    def rows(self) -> Int64Array:
        """All rows (N × 6), mapped."""
        path = self.folder / f"{self.name}.{ITEMS}"
        found = load_index(path)
        if len(found) % _COLUMNS:
            raise self.damaged()
        return found.reshape(-1, _COLUMNS)

    def damaged(self) -> UserError:
        """One sentence for a table that makes no sense."""
        return UserError(f"{self.folder / f'{self.name}.{ITEMS}'} is damaged; prepare the folder {self.folder} again")


class MediaIndex:
    """The tables of a split, one shard behind the other, and the files that they point to."""

    def __init__(self, shards: Sequence[ShardItems]) -> None:
        self._shards = list(shards)
        self._firsts = np.array([shard.first for shard in self._shards], np.int64)
        self._rows: dict[int, Int64Array] = {}
        self._files = MediaFiles()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": {}, "_files": MediaFiles()}

    def shifted(self, tokens: int) -> list[ShardItems]:
        """The shards behind so many other tokens."""
        return [ShardItems(one.folder, one.name, one.first + tokens, one.files) for one in self._shards]

    def between(self, start: int, stop: int, longest: int) -> Iterator[tuple[int, ItemRow]]:
        """Items of which some token is between two places, each with the number of its shard; none has more than
        `longest` tokens."""
        first = max(0, int(np.searchsorted(self._firsts, start - longest, side="right")) - 1)
        for number in range(first, len(self._shards)):
            offset = int(self._firsts[number])
            if offset >= stop:
                return
            rows = self._table(number)
            low, high = np.searchsorted(rows[:, 0], (start - longest - offset, stop - offset))
            for row in rows[low:high].tolist():
                yield number, ItemRow(row[0] + offset, *row[1:])

    def places_and_counts(self) -> tuple[Int64Array, Int64Array]:
        """Where every picture, film and sound begins, and the items it becomes."""
        tables = [self._table(number) for number in range(len(self._shards))]
        empty = np.empty(0, np.int64)
        places = [table[:, 0] + first for table, first in zip(tables, self._firsts, strict=True)]
        return np.concatenate([empty, *places]), np.concatenate([empty, *(table[:, 1] for table in tables)])

    def counted(self, fields: int) -> list[int]:
        """Pictures, films and sounds of each of so many fields."""
        tables = [self._table(number)[:, 5] for number in range(len(self._shards))]
        found: list[int] = np.bincount(np.concatenate([np.empty(0, np.int64), *tables]), minlength=fields).tolist()
        return found

    def read(self, shard: int, row: ItemRow) -> bytes:
        """The bytes of a row."""
        own = self._shards[shard]
        if row.file >= 0:
            if row.file >= len(own.files):
                raise own.damaged()
            return self._files.read(own.files[row.file], row.offset, row.size)
        copies = SourceFile(str(own.folder / f"{own.name}.{COPIES}"))
        raw = self._files.read(copies, row.offset, row.size)
        return raw if row.file == COPIED else self._files.read_whole(raw.decode("utf-8"))

    def name(self, shard: int, row: ItemRow) -> str:
        """Where a row's bytes are, in words."""
        own = self._shards[shard]
        if row.file >= 0:
            return f"{own.files[row.file].name} at byte {row.offset}"
        if row.file == NAMED:
            copies = SourceFile(str(own.folder / f"{own.name}.{COPIES}"))
            return self._files.read(copies, row.offset, row.size).decode("utf-8", "replace")
        return f"{own.folder / f'{own.name}.{COPIES}'} at byte {row.offset}"

    def _table(self, number: int) -> Int64Array:
        if number not in self._rows:
            self._rows[number] = self._shards[number].rows()
        return self._rows[number]
