"""`meshwright plan --check JOB --scale`: one job on other numbers of GPUs, or along one axis."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.plan import Point


def show_scale(
    source: str, cluster: str | None, overrides: list[str], sizes: str, axis: str | None, weak: bool, as_json: bool
) -> None:
    """Predict the job at every size and draw the results."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.errors import UserError
    from meshwright.job import load_job
    from meshwright.layout import resolve_for
    from meshwright.plan import check_target, scale, scale_lines

    numbers = [int(word) for word in sizes.split(",") if word.strip().isdigit() and int(word) > 0]
    if not numbers or len(numbers) != len(sizes.split(",")):
        raise UserError(f"--scale = {sizes} is not a list of numbers; write e.g. 8,16,32")
    job = load_job(source, overrides, trust=True).job  # none of its code is run
    machine, note = check_target(job, cluster)
    points = scale(resolve_for(job, machine), machine, numbers, "weak" if weak else "strong", axis)
    largest = next((one.bars for one in reversed(points) if one.bars is not None), None)
    evidence = None if largest is None else {"time": largest.evidence, "memory": largest.memory_evidence}
    guessed = list(dict.fromkeys(guess for one in points if one.prediction for guess in one.prediction.guessed))
    used = list(dict.fromkeys(one.prediction.profile for one in points if one.prediction))
    if as_json:
        rows = [_row(one, axis) for one in points]
        answer = {"axis": axis, "kind": "weak" if weak else "strong", "points": rows, "evidence": evidence}
        print_json({**answer, "profile": used[0] if used else None, "guessed": guessed})
        return
    last = [] if largest is None else [f"evidence for the last: {largest.evidence}"]
    below = [*last, *(f"profile: {one}" for one in used), *(f"guessed: {guess}" for guess in guessed)]
    for line in [*([note] if note else []), *scale_lines(points, axis), *below]:
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _row(point: "Point", axis: str | None) -> dict[str, Any]:
    if point.prediction is None or point.job is None or point.bars is None:
        return {"gpus": None, "size": point.gpus, "why": point.why}
    return {
        "gpus": point.gpus,
        "size": getattr(point.job.layout, axis) if axis else point.gpus,
        "step_s": point.prediction.step_s,
        "tokens_per_s": point.prediction.tokens_per_s_per_gpu * point.gpus,
        "tokens_per_s_per_gpu": point.prediction.tokens_per_s_per_gpu,
        "mfu": point.prediction.mfu,
        "interval": point.bars.as_json(),
        "efficiency": point.efficiency,
        "device_bytes": point.prediction.fullest.device,
        "fits": point.prediction.fits,
    }
