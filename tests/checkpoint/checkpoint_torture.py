"""A run killed again and again, at random and at the worst moments, and resumed each time.

python tests/checkpoint/checkpoint_torture.py --moments 60 --ranks 2      the long form; prints what it did as JSON
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from meshwright.checkpoint import Checkpoint, checkpoints, tensorfile
from meshwright.checkpoint import saver as keeping
from meshwright.checkpoint.staging import Staging
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.ranks import find_place
from meshwright.runs.folder import RunFolder
from meshwright.train import frozen
from meshwright.verify.ranks import RankError, RankGroup

STEPS = 12
SMALL = Path(__file__).parents[1] / "small.toml"
SET = ["evaluation.every_steps=5", "evaluation.batches=1", "evaluation.sample_tokens=0", "checkpoint.every_steps=2"]
SET += [f"run.steps={STEPS}"]
WORST = ["staging", "tensors", "share", "seal", "before rename", "after rename", "prune", "append"]
"""Points of a save at which a process kills itself."""


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(point: str, after: int) -> None:
    """Have this process die inside a save, at the point's so-manieth time."""
    left = [after]

    def then_die(whole: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def armed(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if half is not None:
                    half(*given, **named)
                die()
            return whole(*given, **named)

        return armed

    if point == "staging":
        stage = Staging.stage
        Staging.stage = then_die(stage, lambda self, parts: stage(self, parts[: len(parts) // 2]))
    elif point == "tensors":
        blocks = tensorfile._blocks

        def torn(*given: Any) -> Any:
            left[0] -= 1
            for number, block in enumerate(blocks(*given)):
                if left[0] < 0 and number == 3:
                    die()
                yield block

        vars(tensorfile)["_blocks"] = torn
    elif point == "share":
        keeping.write_share = then_die(keeping.write_share, keeping.write_share)
    elif point == "seal":
        keeping.seal = then_die(keeping.seal, keeping.seal)
    elif point == "before rename":
        keeping._bring_into_sight = then_die(keeping._bring_into_sight)
    elif point == "after rename":
        keeping._bring_into_sight = then_die(keeping._bring_into_sight, keeping._bring_into_sight)
    elif point == "prune":
        keeping.remove = then_die(keeping.remove)
    elif point == "append":
        append = RunFolder._append
        RunFolder._append = then_die(append, half_a_line)


def half_a_line(folder: RunFolder, name: str, row: dict[str, Any]) -> None:
    with (folder.path / name).open("a") as file:
        file.write('{"step": 9')


def alone(folder: str, point: str | None, after: int) -> None:
    """In a forked process: the run from where it stands to its end."""
    os.chdir(folder)
    if point is not None:
        arm(point, after)
    run_job(load_job(str(SMALL), SET), Console(quiet=True), resume=True)


def as_rank(folder: str, point: str | None, after: int, victim: int) -> None:
    os.chdir(folder)
    place = find_place(os.environ)
    assert place is not None
    if point is not None and place.rank == victim:
        arm(point, after)
    loaded = load_job(str(SMALL), [*SET, f"layout.dp_shard={place.size}", "layout.zero=2", "batch.micro_batch=1"])
    run_job(loaded, Console(quiet=True), place, resume=True)


def attempt(folder: Path, ranks: int, point: str | None, after: int, victim: int, delay_s: float | None) -> bool:
    """One attempt, killed inside a save or after a delay or not at all; true when it ended by itself."""
    if ranks == 1:
        process = multiprocessing.get_context("fork").Process(target=alone, args=(str(folder), point, after))
        with frozen():  # else each attempt's first collection copies all that was imported
            process.start()
        process.join(delay_s if point is None else None)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode == 0
    group = RankGroup(as_rank, ranks, str(folder), point, after, victim, timeout_s=300.0)
    try:
        if delay_s is not None:
            deadline = time.monotonic() + delay_s
            while time.monotonic() < deadline:
                if group.poll(max(0.0, deadline - time.monotonic())):
                    return True
            doomed = group._processes if victim < 0 else [group._processes[victim]]  # a rank, or all
            for rank in doomed:
                rank.kill()
        while not group.poll(1.0):
            pass
        return True
    except RankError:
        return False
    finally:
        group.close()


def losses(run: Path) -> list[tuple[Any, ...]]:
    """What must be equal, as text, so that every bit counts."""
    rows = [row for row in RunFolder.open(run).metrics() if "loss" in row]
    return [tuple(repr(row[name]) for name in ("step", "loss", "grad_norm", "lr", "tokens")) for row in rows]


def require_sound(run: Path) -> int:
    """Everything in sight is complete and bit-equal to what was written; returns the newest step."""
    found = list(checkpoints(run))
    for one in found:
        assert isinstance(one, Checkpoint), one
        one.verify()
    return found[0].facts.step if found else 0


def torture(folder: Path, moments: int, ranks: int, seed: int) -> dict[str, Any]:
    """Kill a run at so many moments; the numbers it ends with are those of a run left alone."""
    dice, tried, steps = random.Random(seed), Counter[str](), list[int]()
    whole, hurt = folder / "whole", folder / "hurt"
    for place in (whole, hurt):
        place.mkdir()
    began = time.monotonic()
    assert attempt(whole, ranks, None, 0, 0, None)
    usual_s = time.monotonic() - began
    expected, differ, ended, attempts = losses(whole / "run"), 0, 0, 0

    def compare() -> None:
        """A run that came to its end: what it recorded, and what it left."""
        nonlocal differ, ended, attempts
        run = hurt / "run"
        assert require_sound(run) == STEPS
        assert all(entry.name.startswith("step-") for entry in (run / "checkpoints").iterdir())
        differ += sum(a != b for a, b in zip(expected, losses(run), strict=True))
        attempts += 1 + max(row["attempt"] for row in RunFolder.open(run).metrics())
        ended += 1
        shutil.rmtree(run)

    while sum(tried.values()) < moments:
        turn = sum(tried.values())
        point = WORST[turn // 2 % len(WORST)] if turn % 2 else None
        victim = dice.randrange(-1, ranks) if point is None else 0
        delay_s = dice.uniform(0.1, usual_s) if point is None else None
        if attempt(hurt, ranks, point, dice.randrange(3), victim, delay_s):
            compare()
            continue
        tried[point or "random"] += 1
        if (hurt / "run").is_dir():
            steps.append(require_sound(hurt / "run"))
    assert attempt(hurt, ranks, None, 0, 0, None)
    compare()
    return {
        "moments": sum(tried.values()),
        "by_point": dict(tried),
        "attempts": attempts,
        "runs_ended": ended,
        "steps_resumed_from": steps,
        "rows_compared": ended * len(expected),
        "rows_that_differ": differ,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = torture(Path(folder), given.moments, given.ranks, given.seed)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(result["rows_that_differ"] > 0)


if __name__ == "__main__":
    main()
