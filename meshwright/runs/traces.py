"""The traces in a run folder: which there are, of any attempt and rank."""

import re
from collections.abc import Sequence
from pathlib import Path

TRACES = "traces"
"""Their folder."""
VIEWERS = "ui.perfetto.dev or chrome://tracing"
_NAME = re.compile(r"attempt-(\d{1,9})-steps-(\d{1,15})-(\d{1,15})-rank-(\d{1,9})\.json\.gz")


def traces_of(run: Path) -> Sequence[Path]:
    """A run's finished traces, by attempt, step and rank."""
    return traces_in(run / TRACES)


def traces_in(folder: Path) -> Sequence[Path]:
    """The same for any folder of traces."""
    try:
        found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    except OSError:  # none was asked for
        return []
    numbers = {path: [int(number) for number in name.groups()] for path, name in found.items() if name}
    files = [path for path in numbers if path.is_file() and not path.is_symlink()]
    return sorted(files, key=lambda path: numbers[path])
