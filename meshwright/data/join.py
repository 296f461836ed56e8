"""Sources joined by key: each document of the first, followed by what the others hold under the same key."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

BETWEEN = "\n\n"
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
        return BETWEEN.join([text, *self.texts(key)])

    def texts(self, key: str) -> list[str]:
        """What is kept under a key, in the order of the sources."""
        found = self._table.execute("SELECT text FROM texts WHERE key = ? ORDER BY rowid", (key,))
        return [text for (text,) in found]


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
