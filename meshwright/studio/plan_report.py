"""The charts of one layout: memory, time, schedule, mesh and scaling, for the page and for a self-contained file."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.studio.bars import memory_bars, step_bar
from meshwright.studio.chart import Series, line_chart
from meshwright.studio.curves import Point
from meshwright.studio.files import write_page
from meshwright.studio.gantt import gantt
from meshwright.studio.mesh import mesh
from meshwright.studio.page import page
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.job.devices import Cluster
    from meshwright.pipeline import Simulation, Table
    from meshwright.plan import Point as Scaled
    from meshwright.plan import Prediction

GIB = 2**30
_MOST_ACTIONS = 3000
"""Of a drawn schedule: a step of many micro-batches is repetitive, and too large for a browser."""
_SCALES = (1, 2, 4, 8, 16)


def layout_pictures(job: "Job", cluster: "Cluster", prediction: "Prediction") -> str:
    """All charts of a job planned for these machines, as HTML."""
    from meshwright.plan import timeline

    drawn = timeline(job, cluster, _drawn_micro_batches(job))
    parts = [memory_bars(prediction), step_bar(prediction), _schedule(job, drawn)]
    return "".join([*parts, _mesh(job, cluster, None if drawn is None else drawn[0]), _scaling(job, cluster)])


def write_plan_report(job: "Job", cluster: "Cluster", name: str, out: Path) -> Path:
    """Write the charts of a job on these machines as one page, and return its path."""
    from meshwright.plan import error_bars, job_text, layout_words, predict

    prediction = predict(job, cluster)
    bars = error_bars(job, cluster, prediction)
    rate, step, size = (
        "–".join(format(end, form) for end in ends)
        for ends, form in (
            (bars.tokens_per_s_per_gpu, ",.0f"),
            (bars.step_s, ".3g"),
            ([size / GIB for size in bars.device_bytes], ".0f"),
        )
    )
    mfu = "unknown" if prediction.mfu is None else f"{prediction.mfu:.1%}"
    over = prediction.fullest.device - prediction.capacity_bytes
    room = f"{-over / GIB:.1f} GiB to spare" if over <= 0 else f"does not fit: {over / GIB:.1f} GiB too much"
    batch = f"{job.batch.global_batch} sequences of {job.batch.sequence_length}"
    tiles = (
        ("Tokens per second", f"{prediction.tokens_per_s_per_gpu:,.0f}", f"per {prediction.per}; 80% interval {rate}"),
        ("MFU", mfu, "attention over every pair"),
        ("Step", f"{prediction.step_s:.3g} s", f"{batch}; 80% interval {step} s"),
        ("Memory", f"{prediction.fullest.device / GIB:.1f} GiB", f"{room}; 80% interval {size} GiB"),
    )
    shown = "".join(
        f'<div class="tile"><div class="what">{what}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, value, more in tiles
    )
    machines = f"{cluster.nodes} × {cluster.gpus_per_node} × {cluster.gpu}"
    notes = [f"evidence for time: {bars.evidence}", f"evidence for memory: {bars.memory_evidence}"]
    notes += [f"profile: {prediction.profile}", *(f"guessed: {guess}" for guess in prediction.guessed)]
    guessed = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    body = (
        f'<header><div class="name"><h1>{escape(name)}</h1></div><p class="facts">'
        f"<span>{escape(layout_words(job))}</span>"
        f'<span>{escape(machines)}</span></p></header><div class="tiles">{shown}</div>'
        f"<h2>Predicted</h2>{layout_pictures(job, cluster, prediction)}{guessed}"
        f"<h2>Job</h2><pre>{escape(job_text(job, f'a plan for {machines}'))}</pre>"
        f"<footer>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Meshwright {VERSION}.</footer>"
    )
    return write_page(out, page(f"{name} · Meshwright", body))


def _schedule(job: "Job", drawn: "tuple[Table, Simulation] | None") -> str:
    if drawn is None:
        return (
            '<figure class="picture gantt"><figcaption><h3>Pipeline schedule</h3></figcaption>'
            '<p class="note">One stage: '
            f"{job.accumulation} micro-batches one after the other, without a bubble.</p></figure>"
        )
    return gantt(*drawn, job.accumulation)


def _drawn_micro_batches(job: "Job") -> int:
    """The number of micro-batches in as many rounds of the pipeline as can be drawn, at least one."""
    layout = job.layout
    round_actions = 2 * layout.pp * layout.pp * (layout.virtual_stages or 2)
    rounds = max(1, min(3, _MOST_ACTIONS // round_actions))
    return min(job.accumulation, rounds * layout.pp)


def _mesh(job: "Job", cluster: "Cluster", table: "Table | None") -> str:
    from meshwright.layout import axes

    return mesh(axes(job.layout), cluster.gpus_per_node, _stages(job, table), job.layout.ep)


def _stages(job: "Job", table: "Table | None") -> list[str]:
    """What each pipeline rank holds, in words; empty without a pipeline."""
    from meshwright.layout import stages_of_rank

    if table is None:
        return []
    ranks = [[layers for layers, _ in stages_of_rank(job, table, rank)] for rank in range(table.ranks)]
    return ["; ".join(_stage(layers, job.model.layers) for layers in stages) for stages in ranks]


def _stage(layers: range, of: int) -> str:
    last = layers.stop - 1
    held = f"layer {last}" if len(layers) == 1 else f"layers {layers.start}–{last}"
    return ("embedding, " if layers.start == 0 else "") + held + (", head" if layers.stop == of else "")


def _scaling(job: "Job", cluster: "Cluster") -> str:
    """Throughput with more data parallelism: the batch growing with the GPUs, and the same batch on more of them."""
    from meshwright.plan import scale

    gpus = cluster.nodes * cluster.gpus_per_node
    sizes = [gpus * times for times in _SCALES]
    weak, strong = ([_total(point) for point in scale(job, cluster, sizes, kind, None)] for kind in ("weak", "strong"))
    first = next((rate for _, rate in weak if rate), 0.0)
    ideal: list[Point] = [(gpus, first), (sizes[-1], first * _SCALES[-1])]
    series = [
        Series("ideal", "train", ideal),
        Series("batch grows with the GPUs", "plain", weak),
        Series("same batch", "other", [point for point in strong if point[1] is not None]),
    ]
    charts = [
        line_chart("Scaling", "tokens/s", series, wide=wide, from_zero=True, axis="GPU") for wide in (True, False)
    ]
    return f'<div class="scaling">{"".join(charts)}</div>'  # for a page, and for a phone


def _total(point: "Scaled") -> Point:
    prediction = point.prediction
    return point.gpus, None if prediction is None else prediction.tokens_per_s_per_gpu * point.gpus
