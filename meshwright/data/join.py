"""Sources joined by key: each document of the first, followed by what the others hold under the same key."""

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.data.sources import Document, Source, iterate_keyed
from meshwright.errors import UserError

_BETWEEN = "\n\n"
"""Parts of a joined document stand apart by an empty line."""


class Joined:
    """The texts of all sources but the first, by key, in a file: memory does not grow with them."""

    def __init__(self, path: Path) -> None:
        # A tokenizer in training reads from a thread of its own, though never beside this one.
        self._table = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)

    def close(self) -> None:
        """Let go of the file."""
        self._table.close()

    def follow(self, key: str, text: str) -> str:
        """A text with what belongs to it, in the order of the sources."""
        found = self._table.execute("SELECT text FROM texts WHERE key = ? ORDER BY rowid", (key,))
        return _BETWEEN.join([text, *(other for (other,) in found)])


def write_joined(path: Path, records: Iterable[tuple[str, str]]) -> None:
    """Make the file of keys and texts; it is whole when this returns."""
    with closing(sqlite3.connect(path, isolation_level=None)) as table:
        table.execute("PRAGMA journal_mode = OFF")
        table.execute("PRAGMA synchronous = OFF")
        table.execute("BEGIN")
        table.execute("CREATE TABLE texts (key TEXT, text TEXT)")
        table.executemany("INSERT INTO texts VALUES (?, ?)", records)
        table.execute("CREATE INDEX by_key ON texts (key)")
        table.execute("COMMIT")


class JoinedSources:
    """The documents of a job's first source with what belongs to them."""

    def __init__(self, joined: Joined, text_field: str, key_field: str) -> None:
        self._joined, self._text_field, self._key_field = joined, text_field, key_field

    def documents(self, sources: Sequence[Source]) -> Iterator[Document]:
        """One after the other."""
        for source in sources:
            for key, document in iterate_keyed(source, self._text_field, self._key_field):
                yield replace(document, text=self._joined.follow(key, document.text))


@contextmanager
def joined(sources: Sequence[Source], text_field: str, key_field: str, scratch: Path) -> Iterator[JoinedSources]:
    """The first source joined with the others; what that takes lies under scratch and is gone afterwards."""
    if len(sources) < 2:
        raise UserError(f'data.join = "{key_field}" needs two data.sources or more; name them or leave it out')
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".join-", dir=scratch) as folder:
        path = Path(folder) / "texts.db"
        others = (record for source in sources[1:] for record in iterate_keyed(source, text_field, key_field))
        write_joined(path, ((key, document.text) for key, document in others))
        with closing(Joined(path)) as table:
            yield JoinedSources(table, text_field, key_field)
