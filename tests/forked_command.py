"""The command in a fork of the tests, which signals reach as they reach a new program."""

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import LIMIT_S

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from fault_runs import Forked, command, processes_of


class ForkedCommand(Forked):
    """`meshwright` with these arguments in a folder, where the files `out` and `err` take what it and its ranks say.

    It leads a group of processes, as one that a terminal started.
    """

    def __init__(self, folder: Path, *arguments: str, prepare: Callable[[], Any] = lambda: None) -> None:
        self.folder = folder

        def main() -> None:
            faulthandler.disable()  # where ranks leave stacks, the command has enabled it
            prepare()
            command(list(arguments))

        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            super().__init__(main, {**os.environ, "OMP_NUM_THREADS": "1"}, out, err, folder)

    def finish(self) -> tuple[int, str, str]:
        """Its exit code and what was said, once it has ended and left no process behind."""
        code = self.wait(LIMIT_S)
        assert processes_of(self.folder) == []
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()
