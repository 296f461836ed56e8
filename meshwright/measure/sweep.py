"""Measure a list of settings one after the other, each in its own process, with results that persist."""

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.python_process import python_command, python_variables

OUT_OF_MEMORY = "ran out of memory"


def settings_of(fields: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of `field=value,value,…` as overrides; commas inside brackets and quotes do not split."""
    axes = []
    for field in fields:
        name, equals, values = field.partition("=")
        parts = _parted(values)
        if not name or not equals or not all(parts):
            raise UserError(f'--sweep "{field}" is not of the form field=value,value; write e.g. batch.micro_batch=4,8')
        axes.append([f"{name}={part}" for part in parts])
    return list(itertools.product(*axes))


def _parted(text: str) -> list[str]:
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


@dataclass(frozen=True)
class Sweep:
    """One job under many settings; each result is a line of a file, and settings with a result are not repeated."""

    job: str
    overrides: tuple[str, ...]
    """Overrides for all settings."""
    settings: Sequence[tuple[str, ...]]
    arguments: tuple[str, ...]
    """Extra arguments of `meshwright bench`."""
    file: Path

    def done(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """Rows of this job, overrides and arguments that are already in the file."""
        rows = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a sweep that was killed
            if self._asked() == {name: row.get(name) for name in self._asked()}:
                rows[tuple(row["setting"])] = row
        return rows

    def left(self) -> list[tuple[str, ...]]:
        """Settings without a row."""
        done = self.done()
        return [setting for setting in self.settings if setting not in done]

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure what is left; yields each row, already written to the file, as soon as it is known."""
        for setting in self.left():
            row = {**self._asked(), "setting": list(setting), **self._measure(setting)}
            torn = self.file.exists() and not self.file.read_text(encoding="utf-8").endswith("\n")
            with self.file.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps(row) + "\n")
            yield row

    def _asked(self) -> dict[str, Any]:
        return {"job": self.job, "overrides": list(self.overrides), "arguments": list(self.arguments)}

    def _measure(self, setting: tuple[str, ...]) -> dict[str, Any]:
        words = [word for override in (*self.overrides, *setting) for word in ("--set", override)]
        command = python_command("-m", "meshwright", "bench", self.job, *words, *self.arguments, "--json")
        variables = {**os.environ, **python_variables()}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, encoding="utf-8")
        if done.returncode == 0:
            return {"state": "measured", "result": json.loads(done.stdout)}
        why = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("meshwright: ")
        if OUT_OF_MEMORY in done.stderr:
            return {"state": "out of memory", "why": why}
        return {"state": "refused" if done.returncode == 2 else "failed", "why": why or f"exit code {done.returncode}"}
