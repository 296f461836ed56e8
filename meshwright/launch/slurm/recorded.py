"""The log of a run without Slurm: rank 0 writes to its console alone, so what it recorded is shown as lines."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.reading import EVENTS, METRICS, Kind, Row, Tally, Unfit, open_plain, printable, rows_in
from meshwright.runs import RunFolder

_LONGEST = 200
_NEWEST_BYTES = 16 << 20
_BEGIN, _STEP, _OTHER = range(3)
_Place = tuple[int, int, int]
"""Where a line belongs: attempt, step, and what of the step it is."""


class RecordedLog:
    """What a run has recorded, as lines in the order it happened."""

    def __init__(self, run: Path) -> None:
        """Start at the beginning of the run."""
        self._run, self._folder = run, RunFolder.open(run)
        self._offsets = dict.fromkeys((EVENTS.name, METRICS.name), 0)
        self._event, self._attempt = (0, 0), 0
        log = self._folder.job().get("log", {})
        self._every = every if type(every := log.get("every_steps")) is int else 1

    def new(self) -> Iterator[str]:
        """The lines since the last call."""
        try:
            yield from self._new()
        except (FileNotFoundError, Unfit) as error:
            raise UserError(f"{self._run} cannot be read ({error}); restore it from a copy") from None

    def texts(self) -> dict[str, str]:
        """All lines, as of one file."""
        return {str(self._run / EVENTS.name): "".join(self.new())}

    def _new(self) -> Iterator[str]:
        steps = self._folder.steps()
        found = [(self._event_place(row), _event(row)) for row in self._rows(EVENTS)]
        rows = [(self._step_place(row), row) for row in self._rows(METRICS)]
        found += [(place, _step(row, steps)) for place, row in rows if self._due(row, steps)]
        yield from (line + "\n" for _, line in sorted(found, key=lambda one: one[0]))

    def _rows(self, kind: Kind) -> list[Row]:
        """The rows that were added; of a very long run's first look only the newest."""
        with os.fdopen(open_plain(self._run / kind.name), "rb") as file:
            begin = max(self._offsets[kind.name], os.fstat(file.fileno()).st_size - _NEWEST_BYTES)
            file.seek(begin)
            data = file.read()
        skipped = data.find(b"\n") + 1 if begin > self._offsets[kind.name] else 0
        end = data.rfind(b"\n") + 1
        self._offsets[kind.name] = begin + end
        return rows_in(data[skipped:end], kind, Tally(kind.name))

    def _event_place(self, row: Row) -> _Place:
        """An event without a step happened at the last one named."""
        begins = row["kind"] in ("start", "resume")
        self._event = (row.get("attempt", self._event[0]), row.get("step") or (0 if begins else self._event[1]))
        return (*self._event, _BEGIN if begins else _OTHER)

    def _step_place(self, row: Row) -> _Place:
        self._attempt = row.get("attempt", self._attempt)
        return (self._attempt, row["step"], _STEP)

    def _due(self, row: Row, steps: int) -> bool:
        """Whether a console would show it: every log.every_steps, the first, the last, and evaluations."""
        return "val_loss" in row or (self._every > 0 and (row["step"] % self._every == 0 or row["step"] in (1, steps)))


def _step(row: Row, steps: int) -> str:
    shown = {"loss": "loss {:.4f}", "val_loss": "validation loss {:.4f}", "tokens_per_s": "{:,.0f} tokens/s"}
    numbers = [form.format(row[name]) for name, form in shown.items() if isinstance(row.get(name), int | float)]
    return "  ".join([f"step {row['step']}/{steps}", *numbers])


def _event(row: Row) -> str:
    given = {name: value for name, value in row.items() if name not in ("kind", "time", "elapsed_s")}
    words = [f"{name} {_short(value)}" for name, value in given.items() if value is not None]
    return printable("  ".join([str(row.get("time", "")), row["kind"], *words]), _LONGEST)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
