"""The top of a report: which run this is, and its main numbers."""

from datetime import datetime
from html import escape
from statistics import median
from typing import Any

from meshwright.amounts import size
from meshwright.runs import Metrics
from meshwright.studio.curves import Point, curve, finite, smooth
from meshwright.studio.numbers import count, duration

_WORDS = {"done": "finished"}
"""States that a report words differently."""


def headline(
    name: str,
    state: str,
    job: dict[str, Any],
    metrics: Metrics,
    events: list[dict[str, Any]],
    environment: dict[str, Any],
) -> str:
    """Name, state, facts and tiles."""
    start: dict[str, Any] = next((event for event in reversed(events) if event["kind"] == "start"), {})
    facts = "".join(f"<span>{escape(fact)}</span>" for fact in _facts(job, start, events, environment))
    tiles = [
        _loss_tile(metrics.rows),
        _tokens_tile(metrics.rows, job),
        _throughput_tile(metrics.rows),
        _mfu_tile(metrics.rows, start),
        _time_tile(metrics, events),
        *_memory_tile(events),
    ]
    shown = _WORDS.get(state, state)
    return (
        f'<header><div class="name"><h1>{escape(name)}</h1><span class="state {state}">{shown}</span></div>'
        f'<p class="facts">{facts}</p></header><div class="tiles">{"".join(tiles)}</div>{_convention(start)}'
    )


def _facts(
    job: dict[str, Any], start: dict[str, Any], events: list[dict[str, Any]], environment: dict[str, Any]
) -> list[str]:
    facts = []
    preset = job.get("model", {}).get("preset")
    if preset:
        facts.append(str(preset))
    if start.get("parameters"):
        facts.append(f"{count(start['parameters'])} parameters")
    if start.get("device"):
        facts.append(str(start["device"]))
    compute = job.get("precision", {}).get("compute")
    if compute:
        facts.append(str(compute))
    began = _moment(environment.get("time"))
    stops = [event["time"] for event in events if event["kind"] == "stop" and event.get("time")]
    ended = _moment(stops[-1]) if stops else ""
    same_day = ended[:10] == began[:10]
    facts.append(f"{began} to {ended[11:] if same_day else ended} UTC" if ended else f"started {began} UTC")
    return facts


def _moment(stamp: str | None) -> str:
    try:
        return f"{datetime.fromisoformat(stamp or ''):%Y-%m-%d %H:%M}"
    except ValueError:
        return "at an unknown time"


def _loss_tile(metrics: list[dict[str, Any]]) -> str:
    validation = [(step, value) for step, value in curve(metrics, "val_loss") if value is not None]
    if validation:
        best_step, best = min(validation, key=lambda point: point[1])
        return _tile("Validation loss", f"{validation[-1][1]:.4f}", f"best {best:.4f} at step {best_step:,.0f}")
    train = curve(metrics, "loss")
    values = finite(smooth(train) or train)
    if not values:
        return _tile("Loss", None, "nothing recorded yet" if not train else "never finite")
    return _tile("Training loss", f"{values[-1]:.4f}", "no validation in this run")


def _tokens_tile(metrics: list[dict[str, Any]], job: dict[str, Any]) -> str:
    tokens = finite(curve(metrics, "tokens"))
    steps = max((row["step"] for row in metrics), default=0)
    wanted = job.get("run", {}).get("steps")
    progress = f"step {steps:,} of {wanted:,}" if isinstance(wanted, int) else f"step {steps:,}"
    return _tile("Tokens seen", count(tokens[-1]) if tokens else None, progress)


def _throughput_tile(metrics: list[dict[str, Any]]) -> str:
    rates = _settled(curve(metrics, "tokens_per_s"))
    step_s = _settled(curve(metrics, "step_s"))
    more = f"median; {_step_time(median(step_s))} per step" if step_s else "median"
    return _tile("Tokens per second", f"{median(rates):,.0f}" if rates else None, more if rates else "")


def _step_time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _mfu_tile(metrics: list[dict[str, Any]], start: dict[str, Any]) -> str:
    shares = _settled(curve(metrics, "mfu"))
    if shares:
        peak = start.get("gpu_peak_flops")
        against = f"; peak {peak / 1e12:,.0f} TFLOP/s" if peak else ""
        return _tile("MFU", f"{median(shares):.1%}", f"median{against}")
    if start and start.get("gpu_peak_flops") is None:
        return _tile("MFU", None, f"no known peak for {start.get('device', 'this device')}", "unknown hardware")
    return _tile("MFU", None, "nothing recorded yet")


def _convention(start: dict[str, Any]) -> str:
    """How the FLOPs of an MFU are counted, since the number means nothing without it."""
    if start.get("gpu_peak_flops") is None or "flops_convention" not in start:
        return ""
    flops = start.get("flops_per_token")
    per_token = "" if flops is None else f", here {flops / 1e9:.3g} GFLOP"
    return f'<p class="note foot">MFU counts {escape(str(start["flops_convention"]))}{per_token}.</p>'


def _time_tile(metrics: Metrics, events: list[dict[str, Any]]) -> str:
    elapsed = max((event.get("elapsed_s", 0.0) for event in events), default=0.0)
    stepping = metrics.sums.seconds
    total = max(elapsed, stepping)
    return _tile("Wall time", duration(total) if total else None, f"{duration(stepping)} in steps" if stepping else "")


def _memory_tile(events: list[dict[str, Any]]) -> list[str]:
    """Peak and steady memory, once a run with at least one step has ended."""
    stop: dict[str, Any] = next((event for event in reversed(events) if event["kind"] == "stop"), {})
    peak, steady = stop.get("peak_memory_bytes"), stop.get("steady_memory_bytes")
    if peak is None:
        return []
    return [_tile("Peak memory", size(peak), f"{size(steady)} between steps" if steady is not None else "")]


def _settled(points: list[Point]) -> list[float]:
    """Values without the first step's, which includes allocation and compilation."""
    return finite(points[1:] or points)


def _tile(what: str, value: str | None, more: str, otherwise: str = "—") -> str:
    shown = f'<div class="value">{escape(value)}</div>' if value else f'<div class="value words">{otherwise}</div>'
    return f'<div class="tile"><div class="what">{what}</div>{shown}<div class="more">{escape(more)}</div></div>'
