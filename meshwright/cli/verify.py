"""`meshwright verify`: check that a layout computes the same numbers as one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import JSON, SET, TRUST
from meshwright.cli.verify_collectives import (
    COLLECTIVES,
    contract_keys,
    contract_lines,
    nccl_keys,
    nccl_lines,
    summary_line,
)
from meshwright.cli.verify_verdict import as_row, print_verdict, say, where
from meshwright.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.job import LoadedJob
    from meshwright.verify import LayerGrade, Line, LineResult

JOB = typer.Argument(None, help="A job file, or a recipe's name such as demo.")
DTYPE = typer.Option(
    None,
    "--dtype",
    help="float64 (and the job's own dtype), float32, bf16, fp16 or fp8; float32 with --run, without experts.",
)
RUN = typer.Option(
    False, "--run", help="Verify `train` itself: data, evaluations, checkpoints, resuming in other layouts."
)
MATRIX = typer.Option(None, "--matrix", help="quick or full: run the matrix of supported layouts instead of a job.")
ONLY = typer.Option(
    None,
    "--only",
    metavar="TEXT",
    help="With --matrix: only layouts whose name contains this; with --random: only this number.",
)
RANDOM = typer.Option(None, "--random", metavar="N", min=1, help="Verify N randomly drawn jobs instead of one.")
MODEL = typer.Option(None, "--model", metavar="FILE.py", help="Verify your own model in one layout of each kind.")
LAYER = typer.Option(None, "--layer", metavar="FILE.py:CLASS", help="Grade a hand-written parallel linear layer.")


def verify(
    job: str | None = JOB,
    overrides: list[str] = SET,
    steps: int | None = typer.Option(None, "--steps", min=1, help="Training steps to compare; 3, or 8 with --run."),
    dtype: str | None = DTYPE,
    matrix: str | None = MATRIX,
    only: str | None = ONLY,
    model: str | None = MODEL,
    layer: str | None = LAYER,
    collectives: bool | None = COLLECTIVES,
    random: int | None = RANDOM,
    seed: int = typer.Option(1, "--seed", min=0, help="With --random: which sequence of jobs."),
    device: str = typer.Option("cpu", "--device", help="cpu, or cuda for this machine's GPUs."),
    run: bool = RUN,
    strict: bool = typer.Option(
        False, "--strict", help="Fail if the check replaces a setting that could hide an error."
    ),
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Shrink a job to CPU size, run it in one process and in its layout, and compare everything they compute."""
    modes = {"JOB": job, "--matrix": matrix, "--model": model, "--layer": layer, "--random": random}
    given = [name for name, value in modes.items() if value is not None]
    if len(given) != 1:
        raise UserError(
            f"verify needs exactly one of {', '.join(modes)}, not {' and '.join(given) or 'none'}; give one of them"
        )
    if matrix is not None and matrix not in ("quick", "full"):
        raise UserError(f"--matrix {matrix} does not exist; use quick or full")
    if only is not None and matrix is None and random is None:
        raise UserError(f'--only "{only}" selects among several layouts; give --matrix or --random with it')

    if run and job is None:
        raise UserError(f"--run verifies a job, not {given[0]}; give a JOB with it")
    if strict and job is None:
        raise UserError(f"--strict is about what the check of a job replaces, not {given[0]}; give a JOB with it")

    from meshwright.api.verifying import require_format, run_format
    from meshwright.job import load_job
    from meshwright.verify import load_matrix, own_model_lines

    asked, dtype = dtype, dtype or "float64"
    require_format(dtype, device)
    if layer is not None and collectives is not None:
        raise UserError(
            "--collectives is for a job or a matrix; --layer always lists a layer's collectives, leave it out"
        )
    ok: bool
    record = job is None if collectives is None else collectives
    if layer is not None:
        ok = _layer(layer, as_json)
    elif matrix is not None:
        ok = _lines({"matrix": matrix}, _chosen(load_matrix(matrix), only), dtype, device, record, as_json)
    elif random is not None:
        from meshwright.cli.verify_random import verify_random

        ok = verify_random(random, seed, only, dtype, device, record, as_json)
    elif model is not None:
        ok = _lines({"model": model}, own_model_lines(model), dtype, device, record, as_json)
    elif run:
        from meshwright.cli.verify_run import verify_run

        assert job is not None
        loaded = load_job(job, overrides, trust=trust)
        ok = verify_run(loaded, steps or 8, asked or run_format(loaded.job), device, strict, as_json)
    else:
        assert job is not None
        ok = _job(load_job(job, overrides, trust=trust), steps or 3, dtype, device, record, strict, as_json)
    if not ok:
        raise typer.Exit(1)


def _chosen(lines: list[Line], only: str | None) -> list[Line]:
    chosen = [line for line in lines if only is None or only in line.name]
    if not chosen:
        raise UserError(f'--only "{only}" matches no layout\'s name; names look like "{lines[0].name}"')
    return chosen


def _job(loaded: LoadedJob, steps: int, dtype: str, device: str, record: bool, strict: bool, as_json: bool) -> bool:
    from meshwright.api import verify as verified
    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.errors import print_error
    from meshwright.verify import RankError

    with stderr_console().status(f"one process and the layout's ranks, {steps} steps in {dtype}"):
        try:
            report = verified(loaded, steps=steps, dtype=dtype, device=device, collectives=record)
        except RankError as error:
            print_error(error)
            return False
    verdict, hiding = report.verdict, report.not_checked
    if as_json:
        first = verdict.first_wrong
        print_json(
            {
                "equal": verdict.equal,
                "nothing_compared": report.nothing_compared,
                "job": loaded.name,
                "layout": report.layout.model_dump(mode="json", exclude_defaults=True),
                "ranks": report.ranks,
                "dtype": dtype,
                "steps": steps,
                "seconds": verdict.seconds,
                "notes": report.notes,
                "could_hide_errors": hiding,
                "first_wrong": None if first is None else as_row(first),
                "collectives": contract_keys(verdict.collectives),
                "nccl": nccl_keys(report.nccl),
                "rows": [as_row(row) for row in verdict.rows],
            }
        )
    else:
        console = stdout_console()
        for change in report.changes:
            say(console, f"{'not checked' if change.hides else 'note'}  {change}")
        for note in verdict.notes:
            say(console, f"note  {note}")
        equal = f"equal: {report.ranks} ranks compute the same as one process"
        print_verdict(console, verdict, equal, report.nothing_compared)
        for line in contract_lines(verdict.collectives) if record else []:
            say(console, line)
        for line in nccl_lines(report.nccl) if verdict.collectives is not None else []:
            say(console, line)
        if strict and hiding:
            say(console, f"--strict: {len(hiding)} of the job's settings were not checked, see above")
    return False if strict and hiding else report.ok


def _lines(of: dict[str, str], lines: list[Line], dtype: str, device: str, record: bool, as_json: bool) -> bool:
    import time

    from rich.text import Text

    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.launch.worker import run_quietly
    from meshwright.verify import Calls, merged, replay_on_gpu, run_matrix
    from meshwright.verify.fused import PLAINLY, runs_plainly
    from meshwright.verify.run_compare import ROUNDING

    results, calls, ok, started = list[Any](), list[Calls](), True, time.monotonic()
    console = stdout_console()
    if device != "cpu" or dtype not in ROUNDING:
        without = [line for line in lines if not line.through_train]
        if len(without) < len(lines):
            report = f"lines that go through `train`, which are checked on the CPU in {' or '.join(ROUNDING)}"
            say(stderr_console(), f"left out: {len(lines) - len(without)} {report}")
        lines = without
    with stderr_console().status("") as status:
        show = lambda line: status.update(Text(f"{len(results)}/{len(lines)}  {line.name}"))  # noqa: E731
        for result in run_matrix(lines, dtype, device, record, began=show, train=run_quietly):
            results.append(_line(result))
            ok = ok and result.ok
            if result.verdict is not None and result.verdict.collectives is not None:
                calls.append(result.verdict.collectives.calls.named(result.line.name))
            if not as_json:
                _print_line(console, result)
        status.update("their distinct calls on NCCL")
        nccl = replay_on_gpu(merged(calls)) if calls else None
    ok = ok and (nccl is None or nccl.ok)
    seconds = time.monotonic() - started
    equal = all(result["equal"] for result in results)
    if as_json:
        print_json(
            {"equal": equal, **of, "dtype": dtype, "seconds": seconds, "layouts": results, "nccl": nccl_keys(nccl)}
        )
    else:
        wrong = sum(not result["equal"] for result in results)
        say(console, f"{len(results) - wrong} of {len(results)} layouts equal ({seconds:.0f} s)")
        if record and not all(line.through_train for line in lines):
            say(console, summary_line([result["collectives"] for result in results]))
        if any(runs_plainly(line.job.layout, device) for line in lines):
            say(console, f"not checked  layout.async_tp: {PLAINLY}")
        for sentence in nccl_lines(nccl) if calls else []:
            say(console, sentence)
    return ok


def _line(result: LineResult) -> dict[str, Any]:
    from meshwright.layout import ranks_of
    from meshwright.verify import worst

    verdict = result.verdict
    first = None if verdict is None else verdict.first_wrong
    return {
        "name": result.line.name,
        "ranks": ranks_of(result.line.job.layout),
        "equal": False if verdict is None else verdict.equal,
        "collectives": None if verdict is None else contract_keys(verdict.collectives),
        "worst": None if verdict is None else as_row(worst(verdict.rows)),
        "first_wrong": None if first is None else as_row(first),
        "error": result.error,
        "seconds": None if verdict is None else verdict.seconds,
    }


def _print_line(console: Console, result: LineResult) -> None:
    from meshwright.verify import worst

    if result.verdict is None:
        say(console, f"failed     {result.line.name}\n{result.error}")
        return
    first, top = result.verdict.first_wrong, worst(result.verdict.rows)
    mark = "equal    " if first is None else "NOT EQUAL"
    say(console, f"{mark}  {top.error:.1e}  {result.verdict.seconds:5.1f} s  {result.line.name}")
    if first is not None:
        say(console, f"           first difference: {where(first)}")
    if result.verdict.replayed is not None:
        say(console, f"           {result.verdict.replayed}")
    if result.verdict.collectives is not None and not result.verdict.collectives.ok:
        for line in contract_lines(result.verdict.collectives):
            say(console, f"           {line}")


def _layer(where: str, as_json: bool) -> bool:
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.verify import grade_layer

    grades = grade_layer(where)
    equal = all(grade.ok for grade in grades)
    if as_json:
        print_json({"equal": equal, "layer": where, "grades": [_grade(grade) for grade in grades]})
        return equal
    console = stdout_console()
    for grade in grades:
        say(console, f"{grade.ranks} ranks, {'with' if grade.bias else 'without'} bias: {_graded(grade)}")
    say(console, "equal to nn.Linear" if equal else "not equal to nn.Linear")
    return equal


def _grade(grade: LayerGrade) -> dict[str, Any]:
    return {
        "ranks": grade.ranks,
        "bias": grade.bias,
        "ok": grade.ok,
        "first_wrong": grade.first_wrong,
        "errors": {name: error if math.isfinite(error) else None for name, error in grade.errors.items()},
        "held": grade.held,
        "forward": grade.forward,
        "backward": grade.backward,
        "problem": grade.problem,
    }


def _graded(grade: LayerGrade) -> str:
    counted = "; ".join(
        f"{when}: {', '.join(f'{count} × {name}' for name, count in counts.items()) or 'no collectives'}"
        for when, counts in (("forward", grade.forward), ("backward", grade.backward))
    )
    if grade.problem is not None:
        return grade.problem
    if grade.first_wrong is not None:
        return f"the {grade.first_wrong} is wrong, off by {grade.errors[grade.first_wrong]:.1e} ({counted})"
    return f"equal, each rank stores at most {max(grade.held):.0%} ({counted})"
