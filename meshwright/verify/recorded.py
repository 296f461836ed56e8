"""The folder in which the ranks of one check record their collectives, and what it shows when the check fails."""

import tempfile
from pathlib import Path

from meshwright.verify.collectives import Record, prove_so_far, read, where_ranks_stand
from meshwright.verify.ranks import RankError, RankTimeout

SHOWN = 5
"""Violations in an error's text."""


class CheckRecords:
    """The records of one check's ranks while it runs."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-collectives-")
        self.folder = Path(self._folder.name)

    def read(self) -> list[Record]:
        """Of all ranks, as far as they got."""
        return read(self.folder, self._ranks)

    def explain(self, error: RankError) -> RankError:
        """The error with details from the records: what is wrong so far, and in a hang which rank waits where."""
        records = self.read()
        lines = [f"collectives: {sentence}" for sentence in prove_so_far(records)[:SHOWN]]
        if isinstance(error, RankTimeout):
            lines += where_ranks_stand(records)
        return type(error)("\n".join([str(error), *lines]))

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
