"""A run as one self-contained page: its results, its course, and exactly what was run."""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshwright.reading import Unfit, read_text
from meshwright.runs import NOTES, Metrics, RunFolder, state_of
from meshwright.runs.rehearsed import is_rehearsal
from meshwright.runs.traces import VIEWERS, traces_of
from meshwright.studio.chart import Series, line_chart
from meshwright.studio.curves import curve, smooth
from meshwright.studio.expectations import expectations
from meshwright.studio.experts import EXPERTS, experts_chart
from meshwright.studio.files import write_page
from meshwright.studio.headline import headline
from meshwright.studio.loss_text import loss_text_section
from meshwright.studio.memory import memory_chart
from meshwright.studio.page import page
from meshwright.studio.rehearsal import write_rehearsal_report
from meshwright.studio.runs import heard
from meshwright.studio.tables import code_tables, environment_table, events_table, job_tables
from meshwright.version import VERSION

_MOST_SAMPLES = 12
_LONGEST_SAMPLE = 4000
_MOST_TRACES = 64
_LONGEST_NOTE = 1 << 16


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write a run's or a rehearsal's report, to RUN/report.html unless `out` is given, and return its path."""
    folder = RunFolder.open(run)
    if is_rehearsal(folder.path):
        return write_rehearsal_report(folder, out)
    metrics, events, memory = folder.numbers(), folder.events(), folder.memory_curve()
    name = folder.path.absolute().name
    unread = [report for tally in folder.unread.values() if (report := tally.sentence())]
    body = "\n".join(
        [
            headline(name, _state(folder, metrics), folder.job(), metrics, events, folder.environment()),
            *(f'<p class="note alarm">{escape(report)}.</p>' for report in unread),
            _missing_backup(folder.job(), events),
            _notes(folder.path / NOTES),
            _charts(metrics),
            memory_chart(memory),
            experts_chart(events),
            expectations(folder.job(), metrics.rows, events),
            _traces(traces_of(folder.path), out or folder.path / "report.html"),
            _samples(folder.samples()),
            loss_text_section(folder.path),
            f"<h2>Events</h2>{events_table([event for event in events if event['kind'] != EXPERTS])}",
            f"<h2>Job</h2>{job_tables(folder.job(), folder.job_file())}",
            f"<h2>Machine</h2>{environment_table(folder.environment())}",
            f"<h2>Code</h2>{code_tables(folder.code(), folder.path / 'code.diff')}",
            f"<footer>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Meshwright {VERSION} from "
            f"{metrics.sums.rows:,} rows of metrics.</footer>",
        ]
    )
    return write_page(out or folder.path / "report.html", page(f"{name} · Meshwright", body), given=out is not None)


def _state(folder: RunFolder, metrics: Metrics) -> str:
    step_s = next((row["step_s"] for row in reversed(metrics.rows) if "step_s" in row), None)
    silent_s = max(0.0, time.time() - (folder.path / "metrics.jsonl").stat().st_mtime)
    return heard(folder.state(), silent_s, step_s)


def _missing_backup(job: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """A note if the run has ended and its last checkpoint was not copied to checkpoint.backup_to."""
    target = job.get("checkpoint", {}).get("backup_to")
    last = {event["kind"]: event for event in events}
    saved, copied = (last.get(kind, {}).get("step") for kind in ("checkpoint", "backup"))
    if not target or saved is None or saved == copied or state_of(events) == "running":
        return ""
    reason = last.get("backup_missing", last.get("backup_failed", {})).get("error", "it ended before the copy did")
    newest = "there is none" if copied is None else f"the newest there is of step {copied}"
    text = f"The last checkpoint, of step {saved}, has no backup in {target} ({reason}); {newest}."
    return f'<p class="note alarm">{escape(text)}</p>'


def _charts(metrics: Metrics) -> str:
    rows, sums = metrics.rows, metrics.sums
    train, validation = curve(rows, "loss"), curve(rows, "val_loss")
    if not train and not validation:
        return '<h2>Curves</h2><p class="empty">No step has been recorded yet.</p>'
    restarts, bad = _restarts(rows), [step for step, value in train if value is None]
    smoothed = smooth(train)
    loss = [
        Series("training loss", "train" if smoothed else "plain", train),
        Series("smoothed", "smooth", smoothed),
        Series("validation loss", "validation", validation),
    ]
    figures = [line_chart("Loss", "nats per token", loss, wide=True, marks=restarts, bad=bad)]
    for title, unit, field, scale, from_zero in (
        ("Throughput", "tokens/s", "tokens_per_s", 1.0, True),
        ("Model FLOPs utilisation", "% of dense peak", "mfu", 100.0, True),
        ("Gradient norm", "before clipping", "grad_norm", 1.0, False),
        ("Learning rate", "learning rate", "lr", 1.0, True),
        ("Memory", "peak, GiB", "memory_bytes", 2.0**-30, True),
        ("Waiting for data", "ms per step", "data_wait_s", 1e3, True),
        ("Loss of extra tokens", "nats per token", "extra_loss", 1.0, False),
        ("Load of experts", "most loaded, × the mean", "expert_imbalance", 1.0, False),
        ("Entropy of experts", "1 if all are used equally", "expert_entropy", 1.0, False),
        ("Dropped by experts", "% of tokens × experts", "expert_dropped", 100.0, True),
    ):
        points = curve(rows, field, scale)
        noisy = smooth(points) if field in ("tokens_per_s", "mfu", "data_wait_s") else []
        if points:
            series = [Series("each step" if noisy else "value", "train" if noisy else "plain", points)]
            series.append(Series("smoothed", "smooth", noisy))
            figures.append(line_chart(title, unit, series, from_zero=from_zero, marks=restarts))
    note = ""
    if sums.first_bad is not None:
        steps = "one step" if sums.bad == 1 else f"{sums.bad:,} steps"
        note = f'<p class="note alarm">{steps} without a finite loss, the first at step {sums.first_bad:,}.</p>'
    return f'<h2>Curves</h2>{note}<div class="charts">{"".join(figures)}</div>'


def _restarts(metrics: list[dict[str, Any]]) -> list[float]:
    """The first step of every attempt after the first."""
    first_steps: dict[Any, float] = {}
    for row in metrics:
        first_steps.setdefault(row.get("attempt", 0), row["step"])
    return list(first_steps.values())[1:]


def _notes(path: Path) -> str:
    try:
        text = read_text(path, _LONGEST_NOTE)
    except (FileNotFoundError, Unfit):
        return ""
    return f"<h2>Notes</h2><pre>{escape(text)}</pre>" if text.strip() else ""


def _samples(samples: dict[int, str]) -> str:
    if not samples:
        return ""
    latest, *earlier = sorted(samples, reverse=True)
    parts = [f'<h2>Samples</h2><div class="sample"><h3>step {latest:,}</h3>{_text(samples[latest])}</div>']
    shown = earlier[:: max(1, -(-len(earlier) // _MOST_SAMPLES))]
    if shown:
        older = "".join(f'<div class="sample"><h3>step {step:,}</h3>{_text(samples[step])}</div>' for step in shown)
        of = "" if len(shown) == len(earlier) else f" of {len(earlier)}"
        parts.append(f"<details><summary>{len(shown)}{of} earlier samples</summary>{older}</details>")
    return "".join(parts)


def _traces(traces: Sequence[Path], page_file: Path) -> str:
    """Links to the profiles of single steps, from where the page is."""
    if not traces:
        return ""
    start = page_file.absolute().parent
    links = [
        f'<li><a href="{escape(quote(os.path.relpath(path.absolute(), start)))}" download>{escape(path.name)}</a></li>'
        for path in traces[:_MOST_TRACES]
    ]
    more = f"<p>{len(traces) - _MOST_TRACES:,} more are not shown.</p>" if len(traces) > _MOST_TRACES else ""
    note = f'<p class="note above">Every operation of some steps, one file per rank; open them in {VIEWERS}.</p>'
    return f"<h2>Traces</h2>{note}<ul>{''.join(links)}</ul>{more}"


def _text(text: str) -> str:
    cut = text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + " …"
    return f"<pre>{escape(cut)}</pre>"
