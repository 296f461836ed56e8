"""A report's table that compares the planner's prediction with what the run measured."""

from statistics import median
from typing import Any

from pydantic import ValidationError

from meshwright.amounts import size
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.plan import Term, compare_with_plan
from meshwright.studio.curves import curve, finite

_MOST_RANKS, _MOST_LAYERS, _MOST_STAGES = 1 << 20, 4096, 64
"""Limits beyond any real training run: the job may be untrusted, and a prediction costs time and memory."""


def expectations(job: dict[str, Any], metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> str:
    """Predicted and measured, or nothing if the planner does not know the machine or the job."""
    start: dict[str, Any] = next((event for event in reversed(events) if event["kind"] == "start"), {})
    stop: dict[str, Any] = next((event for event in reversed(events) if event["kind"] == "stop"), {})
    steps = [step_s for step_s in finite(curve(metrics, "step_s")[1:]) if step_s > 0]  # the first one compiles
    ranks = start.get("ranks", 1)
    if not steps or not start.get("device") or ranks not in range(1, _MOST_RANKS):
        return ""
    try:
        run = Job.model_validate(job)
        if run.model.layers > _MOST_LAYERS or run.layout.pp > _MOST_STAGES:
            return ""
        terms = compare_with_plan(run, start["device"], ranks, median(steps), stop.get("peak_memory_bytes"))
    except (ValidationError, UserError):  # a job of another version
        return ""
    if not terms:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "predicted", "measured", "error"))
    rows = "".join(
        f"<tr><td>{term.name}</td><td>{_shown(term, term.predicted)}</td><td>{_shown(term, term.measured)}</td>"
        f"<td>{term.error:+.1%}</td></tr>"
        for term in terms
    )
    return f"<h2>Predicted and measured</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _shown(term: Term, value: float) -> str:
    if term.unit == "bytes":
        return size(value)
    return f"{1e3 * value:,.1f} ms" if term.unit == "s" else f"{value:,.0f} {term.unit}"
