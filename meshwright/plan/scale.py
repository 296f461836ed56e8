"""How a job's predicted throughput, efficiency and memory change with the number of GPUs, or along one axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import require_layout
from meshwright.plan.error_bars import ErrorBars, error_bars
from meshwright.plan.predict import Prediction, predict

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
_WIDTH = 40


@dataclass(frozen=True)
class Point:
    """One size of the machine."""

    gpus: int
    job: Job | None
    """None where no such layout is valid."""
    prediction: Prediction | None
    efficiency: float | None
    """Tokens per second and GPU relative to the first size that could be predicted."""
    why: str = ""
    """Why there is no prediction."""
    bars: ErrorBars | None = None
    """How sure the prediction is."""


def scale(
    job: Job, cluster: Cluster, sizes: Sequence[int], kind: Literal["strong", "weak"], axis: str | None
) -> list[Point]:
    """A job on other numbers of GPUs: more data-parallel ranks, or one axis as large as `sizes` say.

    `strong` keeps the global batch, `weak` lets it grow with the data-parallel ranks.
    """
    if axis is not None and axis not in AXES:
        raise UserError(f"--axis = {axis} is not a layout axis; give one of {', '.join(AXES)}")

    points: list[Point] = []
    first: float | None = None
    for size in sizes:
        try:
            resized, machine = _resized(job, cluster, size, kind, axis)
            require_layout(resized, machine.nodes * machine.gpus_per_node)
            prediction = predict(resized, machine)
        except UserError as error:
            points.append(Point(size, None, None, None, str(error)))
            continue
        rate = prediction.tokens_per_s_per_gpu
        first = first or rate
        bars = error_bars(resized, machine, prediction)
        points.append(Point(machine.nodes * machine.gpus_per_node, resized, prediction, rate / first, bars=bars))
    return points


def _resized(job: Job, cluster: Cluster, size: int, kind: str, axis: str | None) -> tuple[Job, Cluster]:
    layout = job.layout
    others = layout.tp * layout.cp * layout.pp
    if axis is None:
        if size % others:
            raise UserError(f"--scale = {size} is not a multiple of tp × cp × pp = {others}; leave it out")
        name = "dp_shard" if layout.zero_stage else "dp_replicate"
        other = layout.dp_replicate if layout.zero_stage else layout.dp_shard
        changed = {name: size // others // other}
        if size // others % other:
            raise UserError(f"--scale = {size} does not hold {other} copies of tp × cp × pp = {others}; leave it out")
    else:
        changed = {axis: size}
    fields = {
        **job.model_dump(mode="json", exclude_unset=True),
        "layout": {**layout.model_dump(mode="json", exclude_unset=True), **changed},
        "batch": {**job.batch.model_dump(mode="json"), "global_batch": _batch(job, changed, kind)},
    }
    try:
        wider = Job.model_validate(fields)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    ranks = wider.data_parallel * wider.layout.tp * wider.layout.cp * wider.layout.pp
    per_node = min(cluster.gpus_per_node, ranks)
    if ranks % per_node:
        raise UserError(f"--scale = {size} makes {ranks} ranks, which do not fill nodes of {per_node}; leave it out")
    machine = cluster.model_copy(update={"nodes": ranks // per_node, "gpus_per_node": per_node})
    return wider, machine


def _batch(job: Job, changed: dict[str, int], kind: str) -> int:
    if kind == "strong":
        return job.batch.global_batch
    layout = job.layout
    before = layout.dp_replicate * layout.dp_shard
    after = changed.get("dp_replicate", layout.dp_replicate) * changed.get("dp_shard", layout.dp_shard)
    return job.batch.global_batch * after // before


def scale_lines(points: Sequence[Point], axis: str | None) -> list[str]:
    """A text chart: a bar of efficiency for each size, with throughput and memory."""
    on_cpu = any(point.prediction is not None and point.prediction.on_cpu for point in points)
    name, one = axis or ("ranks" if on_cpu else "GPUs"), "a rank" if on_cpu else "a GPU"
    lines = [f"{name:>8} {'tokens/s':>12} {'80% interval':>15} {one:>9} {'GiB':>7}  efficiency"]
    for point in points:
        if point.prediction is None or point.efficiency is None or point.job is None or point.bars is None:
            lines.append(f"{point.gpus:>8} {point.why}")
            continue
        at = getattr(point.job.layout, axis) if axis else point.gpus
        each = point.prediction.tokens_per_s_per_gpu
        size = point.prediction.fullest.device / 2**30
        bar = "█" * max(1, round(_WIDTH * min(1.2, point.efficiency)))
        over = "" if point.prediction.fits else "  does not fit"
        low, high = (f"{each_end * point.gpus:,.0f}" for each_end in point.bars.tokens_per_s_per_gpu)
        total = f"{each * point.gpus:>12,.0f} {low + '–' + high:>15} {each:>9,.0f} {size:>7.1f}"
        lines.append(f"{at:>8} {total}  {bar} {point.efficiency:.0%}{over}")
    return lines
