"""The first line of a CSV file: its columns, and the character between them."""

import csv
import io
from collections.abc import Sequence

from meshwright.data.lines import LONGEST_RECORD_BYTES
from meshwright.data.raw.items import Taking
from meshwright.errors import UserError

DELIMITERS = ",;\t|"
"""What separates columns in files called .csv, the usual one first."""
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_LONGEST_ROW = LONGEST_RECORD_BYTES >> 2
"""In characters, each of which takes up to four bytes; and a row of nothing but commas takes eight for each."""


def delimited(first: str, delimiters: Sequence[str], name: str, taking: Taking) -> tuple[str, list[str]]:
    """The delimiter with which a file's first row has the columns that are needed, and all its columns.

    A first row that has them with several delimiters, or with none, is refused: the rest would be read wrongly.
    """
    found = {delimiter: _cells(first, delimiter) for delimiter in delimiters}
    fitting = {delimiter: header for delimiter, header in found.items() if _lacking(header, taking) is None}
    if len({tuple(header) for header in fitting.values()}) > 1:
        either = " or ".join(_NAMES[delimiter] for delimiter in fitting)
        raise UserError(
            f"{name} may be separated by {either}, as its first line has the columns with each of them; rename the "
            "columns, or save it with one delimiter"
        )
    if fitting or taking.chat is not None:  # a record without a conversation is refused by itself
        delimiter = next(iter(fitting or found))
        return delimiter, found[delimiter]
    header = max(found.values(), key=len)
    field = _lacking(header, taking)
    option = "data.join (--join)" if field == taking.key_field else "data.text_field (--text-field)"
    raise UserError(
        f'{name} has no column "{field}" (its first line has {", ".join(header[:5])[:200] or "nothing"}); set {option} '
        "to the right one"
    )


def _cells(row: str, delimiter: str) -> list[str]:
    return next(csv.reader(io.StringIO(row, newline=""), delimiter=delimiter), [])


def _lacking(header: list[str], taking: Taking) -> str | None:
    """A needed column that a header does not have once; of a conversation's, any one is enough."""
    if taking.chat is not None:
        return None if set(header) & set(taking.fields) else taking.fields[0]
    return next((field for field in taking.fields if header.count(field) != 1), None)


class RowLines:
    """The lines of a CSV file, whose rows may hold several: a row without end is refused before it fills memory."""

    def __init__(self, stream: io.TextIOWrapper, name: str) -> None:
        self._stream, self._name = stream, name
        self.number = self._held = 0

    def first_row(self) -> str:
        """The lines of the first row: a line end inside quotation marks does not end it."""
        row = next(self, "")
        while row.count('"') % 2 and (line := next(self, "")):
            row += line
        self.begin_row()
        return row

    def begin_row(self) -> None:
        """What comes now belongs to a new row."""
        self._held = 0

    def __iter__(self) -> "RowLines":
        return self

    def __next__(self) -> str:
        line = self._stream.readline(_LONGEST_ROW + 1 - self._held)
        if not line:
            raise StopIteration
        self.number += 1
        self._held += len(line)
        if self._held > _LONGEST_ROW:
            raise UserError(
                f"{self._name}:{self.number} is in a row of more than {_LONGEST_ROW >> 20} Mi characters, perhaps for "
                "lack of a closing quotation mark; fix it or leave the file out"
            )
        return line
