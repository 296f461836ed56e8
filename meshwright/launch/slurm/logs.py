"""The logs of a run's ranks, as they are or followed as they grow."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.errors import UserError
from meshwright.launch.slurm.record import Submission
from meshwright.runs import RunFolder

_CHUNK = 1 << 16
_LONGEST = 16 << 20


def is_recorded(run: Path, rank: int | None) -> bool:
    """Whether rank 0's output is not in a file: a run here, which wrote it to its console."""
    RunFolder.open(run)
    elsewhere = any((run / name).is_dir() for name in ("slurm", "ray"))
    return not rank and not elsewhere and not list((run / "logs").glob("rank-0.*"))


def log_files(run: Path, rank: int | None = None) -> list[Path]:
    """The files of one rank, or those of the jobs including rank 0's output, oldest first."""
    RunFolder.open(run)
    if rank is None:
        found = [path for path in (*run.glob("slurm/job-*.out"), *run.glob("ray/attempt-*.out")) if path.is_file()]
        jobs = sorted(found, key=lambda path: path.stat().st_mtime)
        if not jobs and (Submission.read(run) is not None or (run / "ray").is_dir()):
            raise UserError(
                f"{run} has no log yet: none of its jobs has written one; wait with --follow, or see meshwright status"
            )
        return jobs or log_files(run, 0)
    files = [path for end in ("out", "err") if (path := run / f"logs/rank-{rank}.{end}").is_file()]
    if not files:
        kept = sorted({path.name.split(".")[0].removeprefix("rank-") for path in (run / "logs").glob("rank-*.*")})
        have = f"ranks with a log: {', '.join(kept)}" if kept else "no rank has one"
        raise UserError(f"{run} has no log of rank {rank} ({have}); a rank that wrote nothing leaves none")
    return files


def end_of(path: Path) -> str:
    """The end of a log, all of it unless it is very long."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST))
        return file.read(_LONGEST).decode("utf-8", "replace")


def files_log(files: Callable[[], list[Path]]) -> Callable[[], Iterator[str]]:
    """A function that yields what was added to the files since its last call."""
    read: dict[Path, int] = {}

    def new() -> Iterator[str]:
        for path in files():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(read.get(path, 0))
                while text := file.read(_CHUNK):
                    yield text
                read[path] = file.tell()

    return new


def follow(new: Callable[[], Iterator[str]], alive: Callable[[], bool], every_s: float = 1.0) -> Iterator[str]:
    """Yield what a log has and what is added to it, until nothing is left that could add more."""
    while True:
        last = not alive()  # checked first, so that everything written before the end is read below
        yield from new()
        if last:
            return
        time.sleep(every_s)
