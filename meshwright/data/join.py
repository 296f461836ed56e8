"""Sources joined by key: each document of the first, followed by what the others hold under the same key."""

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.data.sources import Document, Source, iterate_keyed
from meshwright.errors import UserError

BETWEEN = "\n\n"
"""Parts of a joined document stand apart by an empty line."""


class Joined:
    """The texts of all sources but the first, by key, in a file: memory does not grow with them."""

    def __init__(self, table: sqlite3.Connection, text_field: str, key_field: str) -> None:
        self._table, self._text_field, self._key_field = table, text_field, key_field

    def load(self, sources: Sequence[Source]) -> None:
        """Take in the sources that are joined to the first, in order."""
        self._table.execute("CREATE TABLE texts (key TEXT, text TEXT)")
        for source in sources:
            records = iterate_keyed(source, self._text_field, self._key_field)
            self._table.executemany("INSERT INTO texts VALUES (?, ?)", ((key, each.text) for key, each in records))
        self._table.execute("CREATE INDEX by_key ON texts (key)")

    def documents(self, sources: Sequence[Source]) -> Iterator[Document]:
        """The documents of the first source with what belongs to them."""
        for source in sources:
            for key, document in iterate_keyed(source, self._text_field, self._key_field):
                found = self._table.execute("SELECT text FROM texts WHERE key = ? ORDER BY rowid", (key,))
                yield replace(document, text=BETWEEN.join([document.text, *(text for (text,) in found)]))


@contextmanager
def joined(sources: Sequence[Source], text_field: str, key_field: str, scratch: Path) -> Iterator[Joined]:
    """The first source joined with the others; what that takes lies under scratch and is gone afterwards."""
    if len(sources) < 2:
        raise UserError(f'data.join = "{key_field}" needs two data.sources or more; name them or leave it out')
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".join-", dir=scratch) as folder:
        # A tokenizer in training reads from a thread of its own, though never beside this one.
        table = sqlite3.connect(Path(folder) / "texts.db", isolation_level=None, check_same_thread=False)
        with closing(table):
            table.execute("PRAGMA journal_mode = OFF")
            table.execute("PRAGMA synchronous = OFF")
            table.execute("BEGIN")
            made = Joined(table, text_field, key_field)
            made.load(sources[1:])
            table.execute("COMMIT")
            yield made
