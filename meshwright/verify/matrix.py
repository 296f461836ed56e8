"""The repository's matrix of layouts: read it, and run as many lines at once as there are cores for."""

import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.verify.check import Check, Verdict
from meshwright.verify.ranks import RankError, RankTimeout
from meshwright.verify.run_check import Train, check_run
from meshwright.verify.run_plan import as_run
from meshwright.verify.vacuous import Vacuous

FILES = tuple(
    f"{name}.toml"
    for name in (
        *("matrix", "matrix_depth", "matrix_memory", "matrix_experts", "matrix_families", "matrix_compiled"),
        *("matrix_extra", "matrix_lora", "matrix_run", "matrix_preferences", "matrix_vision", "matrix_audio"),
    )
)
"""The first one holds the models and the defaults."""
SECTIONS = (
    *("layout", "batch", "optimizer", "data", "evaluation", "schedule", "memory", "precision", "run"),
    "preference",
)
POLL_S = 0.05

Failure = Literal["refused", "vacuous", "hung", "crashed"]


@dataclass(frozen=True)
class Line:
    """One layout of the matrix."""

    name: str
    job: Job
    quick: bool
    own_model: bool
    """Whether `verify --model` runs a user's model in this layout."""
    dtype: str | None = None
    """The format it is checked in, whatever the others use."""
    through_train: bool = False
    """Whether `train` itself is run, with text on disk, evaluations and checkpoints."""
    prepared: bool = False
    """Whether that text is prepared first."""


@dataclass(frozen=True)
class LineResult:
    """A line's verdict, or the error that prevented one."""

    line: Line
    verdict: Verdict | None
    error: str | None
    failure: Failure | None = None
    """What kind of error it is."""

    @property
    def ok(self) -> bool:
        """Whether the line ran and was equal."""
        return self.verdict is not None and self.verdict.ok


def load_matrix(which: str = "full") -> list[Line]:
    """The lines of all files of the matrix; `quick` keeps those marked so."""
    tables = [tomllib.loads((files("meshwright.verify") / name).read_text(encoding="utf-8")) for name in FILES]
    models, defaults = tables[0]["models"], tables[0]["defaults"]
    lines = [_line(row, models, defaults) for table in tables for row in table["layout"]]
    return [line for line in lines if line.quick or which == "full"]


def own_model_lines(path: str) -> list[Line]:
    """A user's single-file model, at the matrix's llama shape, in one layout of each kind."""
    lines = [line for line in load_matrix() if line.own_model]
    return [
        Line(line.name.replace("llama", Path(path).name), _with_model_file(line.job, path), line.quick, True)
        for line in lines
    ]


def run_matrix(
    lines: Sequence[Line],
    dtype: str = "float64",
    device: str = "cpu",
    collectives: bool = True,
    began: Callable[[Line], None] = lambda line: None,
    train: Train | None = None,
) -> Iterator[LineResult]:
    """Check every line and yield results as they come; lines run together where there are cores for their ranks.

    Lines that go through `train` need the function that trains a rank, and run by themselves.
    """
    waiting, running = list(lines), list[tuple[Line, Check]]()
    cores = os.cpu_count() or 1
    with ExitStack() as ending:
        while waiting or running:
            busy = sum(ranks_of(line.job.layout) for line, _ in running)
            if waiting and waiting[0].through_train:
                if not running:
                    line = waiting.pop(0)
                    began(line)
                    yield _run_result(line, dtype, train)
                    continue
            elif waiting and (not running or busy + ranks_of(waiting[0].job.layout) <= cores):
                line = waiting.pop(0)
                began(line)
                check = Check(line.job, line.dtype or dtype, device, collectives)
                try:
                    check.refer()  # not while ranks wait, whose time is limited
                    check.start()
                except (RankError, UserError) as error:
                    yield _failed(line, error)
                    continue
                ending.callback(check.close)
                running.append((line, check))
                continue
            for line, check in list(running):
                if (result := _result_if_ready(line, check)) is not None:
                    running.remove((line, check))
                    yield result


def _run_result(line: Line, dtype: str, train: Train | None) -> LineResult:
    assert train is not None
    job, _ = as_run(line.job, prepared=line.prepared)
    try:
        return LineResult(line, check_run(job, train, line.dtype or dtype, line.prepared), None)
    except (RankError, UserError) as error:
        return _failed(line, error)


def _result_if_ready(line: Line, check: Check) -> LineResult | None:
    try:
        if not check.finished(POLL_S):
            return None
        return LineResult(line, check.verdict(), None)
    except (RankError, UserError) as error:
        return _failed(line, error)


def _failed(line: Line, error: RankError | UserError) -> LineResult:
    failure: Failure = "crashed"
    if isinstance(error, Vacuous):
        failure = "vacuous"
    elif isinstance(error, UserError | RankTimeout):
        failure = "refused" if isinstance(error, UserError) else "hung"
    return LineResult(line, None, str(error), failure)


def _line(row: dict[str, Any], models: dict[str, Any], defaults: dict[str, Any]) -> Line:
    row = dict(row)
    name, quick, own_model = row.pop("name"), row.pop("quick", False), row.pop("own_model", False)
    dtype = row.pop("dtype", None)
    run = {"through_train": row.pop("through_train", False), "prepared": row.pop("prepared", False)}
    job = {"model": models[row.pop("model")] | row.pop("overrides", {})}
    job |= {section: defaults.get(section, {}) | row.pop(section, {}) for section in SECTIONS}
    if row:
        raise ValueError(f"matrix.toml: {name} has unknown keys {', '.join(row)}")
    return Line(name, Job.model_validate(job), quick, own_model, dtype, **run)


def _with_model_file(job: Job, path: str) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"file": path})})
