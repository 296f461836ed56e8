"""Progress for people: a live bar on a terminal, plain lines anywhere else."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from meshwright.job import Job


class ConsoleProgress:
    """Progress of a run on a console; a context manager, since the live bar must be removed."""

    def __init__(self, job: Job, console: Console) -> None:
        self._job, self._console = job, console
        self._val_loss: float | None = None
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=job.run.steps, numbers="")

    def __enter__(self) -> "ConsoleProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, row: dict[str, Any]) -> None:
        """Move the bar, or print every log.every_steps-th step."""
        numbers = _numbers(row, self._val_loss)
        self._bar.update(self._task, completed=row["step"], numbers=numbers)
        every = self._job.log.every_steps
        due = every > 0 and (row["step"] % every == 0 or row["step"] in (1, self._job.run.steps))
        if not self._console.is_terminal and due:
            left_s = (self._job.run.steps - row["step"]) * row["step_s"]
            self._print(f"step {row['step']}/{self._job.run.steps}  {numbers}  left {_duration(left_s)}")

    def evaluation(self, step: int, val_loss: float) -> None:
        """Print the held-out loss."""
        self._val_loss = val_loss
        self._print(f"step {step}/{self._job.run.steps}  validation loss {val_loss:.4f}")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk must not end the training
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _numbers(row: dict[str, Any], val_loss: float | None) -> str:
    parts = [f"loss {row['loss']:.4f}"]
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}")
    parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if row.get("skipped_steps"):
        parts.append(f"{row['skipped_steps']} skipped")
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
