"""One layout as pictures: memory, time, schedule, mesh and scaling, for the page and for a file that opens anywhere."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.studio.bars import memory_bars, step_bar
from meshwright.studio.chart import Series, line_chart
from meshwright.studio.curves import Point
from meshwright.studio.files import write_whole
from meshwright.studio.gantt import gantt
from meshwright.studio.mesh import mesh
from meshwright.studio.page import page
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.plan import Prediction

GIB = 2**30
_MOST_ACTIONS = 3000
"""Of a drawn schedule: a step of many micro-batches repeats itself, and a browser should not carry it all."""
_SCALES = (1, 2, 4, 8, 16, 32)


def layout_pictures(job: "Job", prediction: "Prediction") -> str:
    """Every picture of a planned job, as HTML; the job's own cluster is where it runs."""
    parts = [memory_bars(prediction), step_bar(prediction), _schedule(job), _mesh(job), _scaling(job, prediction)]
    return "".join(parts)


def write_plan_report(job: "Job", name: str, out: Path) -> Path:
    """Write the pictures of a job on its own cluster as one page, and return where it is."""
    from meshwright.plan import job_text, layout_words, predict

    prediction = predict(job, job.cluster)
    cluster = job.cluster
    mfu = "unknown" if prediction.mfu is None else f"{prediction.mfu:.1%}"
    over = prediction.fullest.device - prediction.capacity_bytes
    room = f"{-over / GIB:.1f} GiB to spare" if over <= 0 else f"does not fit: {over / GIB:.1f} GiB too much"
    tiles = (
        ("Tokens per second", f"{prediction.tokens_per_s_per_gpu:,.0f}", "a GPU"),
        ("MFU", mfu, "attention over every pair"),
        ("Step", f"{prediction.step_s:.3g} s", f"{job.batch.global_batch} sequences of {job.batch.sequence_length}"),
        ("Memory", f"{prediction.fullest.device / GIB:.1f} GiB", room),
    )
    shown = "".join(
        f'<div class="tile"><div class="what">{what}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, value, more in tiles
    )
    machines = f"{cluster.nodes} × {cluster.gpus_per_node} × {cluster.gpu}"
    guessed = "".join(f'<p class="note">guessed: {escape(guess)}</p>' for guess in prediction.guessed)
    body = (
        f'<header><div class="name"><h1>{escape(name)}</h1></div><p class="facts">'
        f"<span>{escape(layout_words(job))}</span>"
        f'<span>{escape(machines)}</span></p></header><div class="tiles">{shown}</div>'
        f"<h2>Predicted</h2>{layout_pictures(job, prediction)}{guessed}"
        f"<h2>Job</h2><pre>{escape(job_text(job, f'a plan for {machines}'))}</pre>"
        f"<footer>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Meshwright {VERSION}.</footer>"
    )
    return write_whole(out, page(f"{name} · Meshwright", body))


def _schedule(job: "Job") -> str:
    from meshwright.plan import timeline

    layout = job.layout
    if layout.pp == 1:
        return (
            '<figure class="picture gantt"><figcaption><h3>Pipeline schedule</h3></figcaption>'
            '<p class="note">One stage: '
            f"{job.accumulation} micro-batches one after the other, without a bubble.</p></figure>"
        )
    drawn = timeline(job, job.cluster, _drawn_micro_batches(job))
    assert drawn is not None
    return gantt(*drawn, job.accumulation)


def _drawn_micro_batches(job: "Job") -> int:
    """As many whole rounds of the pipeline as can be drawn, at least one."""
    layout = job.layout
    round_actions = 2 * layout.pp * layout.pp * (layout.virtual_stages or 2)
    rounds = max(1, min(3, _MOST_ACTIONS // round_actions))
    return min(job.accumulation, rounds * layout.pp)


def _mesh(job: "Job") -> str:
    from meshwright.parallel import axes

    return mesh(axes(job.layout), job.cluster.gpus_per_node)


def _scaling(job: "Job", prediction: "Prediction") -> str:
    """Throughput with more data parallelism: the batch growing with the GPUs, and the same batch on more of them."""
    gpus = job.cluster.nodes * job.cluster.gpus_per_node
    weak: list[Point] = [(gpus, prediction.tokens_per_s_per_gpu * gpus)]
    strong: list[Point] = list(weak)
    for times in _SCALES[1:]:
        for points, batch in ((weak, job.batch.global_batch * times), (strong, job.batch.global_batch)):
            rate = _scaled(job, times, batch)
            if rate is not None:
                points.append((gpus * times, rate * gpus * times))
    ideal: list[Point] = [(gpus * times, weak[0][1] * times) for times in (1, _SCALES[-1])] if weak[0][1] else []
    series = [
        Series("perfect", "train", ideal),
        Series("batch grows with the GPUs", "plain", weak),
        Series("same batch", "other", strong),
    ]
    return (
        f'<div class="scaling">{line_chart("Scaling", "tokens/s", series, wide=True, from_zero=True, axis="GPU")}</div>'
    )


def _scaled(job: "Job", times: int, batch: int) -> float | None:
    """Tokens a second and GPU with so many times the nodes; None where the batch cannot be spread over them."""
    from meshwright.plan import predict

    layout, cluster = job.layout, job.cluster
    data = "dp_shard" if layout.dp_shard > 1 or layout.zero_stage else "dp_replicate"
    grown = layout.model_copy(update={data: getattr(layout, data) * times})
    per_step = job.batch.micro_batch * job.data_parallel * times
    accumulation = batch // per_step
    if batch % per_step or (layout.schedule == "interleaved" and accumulation % layout.pp):
        return None
    larger = cluster.model_copy(update={"nodes": cluster.nodes * times})
    if cluster.nodes == 1 and cluster.gpus_per_node * times <= 8:
        larger = cluster.model_copy(update={"gpus_per_node": cluster.gpus_per_node * times})
    changes = {"layout": grown, "batch": job.batch.model_copy(update={"global_batch": batch}), "cluster": larger}
    try:
        return predict(job.model_copy(update=changes), larger, every_rank=False).tokens_per_s_per_gpu
    except UserError:
        return None
