"""What a console that is no terminal prints of the steps."""

import io

from rich.console import Console

from meshwright.job import load_job
from meshwright.train import ConsoleProgress


def shown(every: int) -> list[str]:
    text = io.StringIO()
    job = load_job("demo", ["run.steps=7", f"log.every_steps={every}"]).job
    with ConsoleProgress(job, Console(file=text)) as progress:
        for step in range(1, 8):
            progress.step({"step": step, "loss": 1.0, "tokens_per_s": 2.0, "step_s": 1.0, "mfu": None})
        progress.evaluation(7, 3.0)
    return [line.split("  ")[0] for line in text.getvalue().splitlines()]


def test_every_so_many_steps_the_first_and_the_last() -> None:
    assert shown(3) == ["step 1/7", "step 3/7", "step 6/7", "step 7/7", "step 7/7"]


def test_0_is_never_but_evaluations_are_told() -> None:
    assert shown(0) == ["step 7/7"]
