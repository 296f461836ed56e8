"""A rehearsal in pictures and tables, for the page and for a report: memory and the plan, the step, the messages."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from meshwright.amounts import size, size_unit
from meshwright.rehearse import Rehearsal, RehearsedRank, RehearsedStep
from meshwright.rehearse.folder import read_rehearsal
from meshwright.rehearse.words import plan_error, rank_words, seconds, shortage, summary
from meshwright.runs import RunFolder
from meshwright.studio.bars import (
    NARROW,
    TIME_TINTS,
    WIDTH,
    Bars,
    axis_below,
    figure_of,
    left_of,
    legend_of,
    room_of,
    tints_of,
)
from meshwright.studio.files import write_page
from meshwright.studio.page import page
from meshwright.studio.tables import code_tables, environment_table, job_tables
from meshwright.version import VERSION

_BAR, _LABEL, _GAP = 16, 18, 14
_MOST_RANKS, _MOST_MESSAGES = 64, 200
"""More than any pipeline has kinds of ranks, and a rank kinds of messages: a file may say anything."""


def write_rehearsal_report(folder: RunFolder, out: Path | None) -> Path:
    """Write a rehearsal's page, to RUN/report.html unless `out` is given, and return its path."""
    rehearsal, name = read_rehearsal(folder.path), folder.path.absolute().name
    facts = (
        f"{rehearsal.world:,} ranks" + (f" on {rehearsal.cluster}" if rehearsal.cluster else ""),
        f"run on {rehearsal.device}",
        f"torch {rehearsal.torch}",
    )
    shown = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    body = (
        f'<header><div class="name"><h1>{escape(name)}</h1><span class="state rehearsed">rehearsed</span></div>'
        f'<p class="facts">{shown}</p></header>{rehearsal_details(rehearsal)}'
        f"<h2>Job</h2>{job_tables(folder.job(), folder.job_file())}"
        f"<h2>Machine</h2>{environment_table(folder.environment())}"
        f"<h2>Code</h2>{code_tables(folder.code(), folder.path / 'code.diff')}"
        f"<footer>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Meshwright {VERSION}.</footer>"
    )
    return write_page(out or folder.path / "report.html", page(f"{name} · Meshwright", body), given=out is not None)


def rehearsal_details(rehearsal: Rehearsal) -> str:
    """All that a rehearsal found, as HTML: tiles, warnings, pictures and tables."""
    failed = [rank for rank in rehearsal.ranks if rank.state == "out of memory"]
    alarms = [f"Out of memory: {shortage(rank, rehearsal)}" for rank in failed]
    notes = [f'<p class="note alarm">{escape(alarm)}.</p>' for alarm in alarms]
    notes += [f'<p class="note alarm">Warning: {escape(warning)}</p>' for warning in rehearsal.warnings]
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in rehearsal.limits)
    parts = [
        f'<div class="tiles">{_tiles(rehearsal)}</div>',
        f"<h2>Rehearsed</h2>{''.join(notes)}",
        _memory(rehearsal),
        "" if rehearsal.step is None else _step(rehearsal.step),
        _compute(rehearsal),
        *(_messages(rank, rehearsal) for rank in rehearsal.ranks[:_MOST_RANKS] if rank.messages),
        f'<h3>What a rehearsal cannot show</h3><ul class="note">{limits}</ul>' if limits else "",
    ]
    return "".join(parts)


def _tiles(rehearsal: Rehearsal) -> str:
    tiles = []
    step = rehearsal.step
    if step is not None:
        planned = "" if step.planned_s is None else f"planned {seconds(step.planned_s)}"
        off = plan_error(step.step_s, step.planned_s)
        tiles.append(("Step", seconds(step.step_s), f"{planned}{f', {off}' if off else ''}"))
        tiles.append(("Measured", _share(step.measured_s, step.step_s), "of the step; the rest is modelled"))
        tiles.append(("Tokens per second", f"{step.tokens_per_s:,.0f}", f"on {rehearsal.world:,} ranks"))
    held = [rank.memory for rank in rehearsal.ranks if rank.memory is not None and rank.state == "measured"]
    if held:
        most = max(held, key=lambda memory: memory.allocated_bytes)
        off = plan_error(most.allocated_bytes, most.planned_bytes)
        more = f"planned {size(most.planned_bytes)}, {off}" if most.planned_bytes else "of the fullest rank"
        tiles.append(("Peak memory", size(most.allocated_bytes), more))
    if not tiles:
        tiles.append(("Result", "—", summary(rehearsal)))
    return "".join(
        f'<div class="tile"><div class="what">{what}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, value, more in tiles
    )


def _memory(rehearsal: Rehearsal) -> str:
    """Two bars for every kind of rank: what was planned, by term, and what was there, by kind."""
    ranks = [rank for rank in rehearsal.ranks[:_MOST_RANKS] if _held(rank)]
    if not ranks:
        return ""
    drawn = [_draw_memory(ranks, rehearsal, width) for width in (WIDTH, NARROW)]
    unit, unit_name = size_unit(_most(ranks))
    rows = []
    for rank in ranks:
        names = ("planned_bytes", "planned_reserved_bytes", "reserved_bytes", "device_bytes")
        planned, *others = (getattr(rank.memory, name, None) for name in names)
        off = "out of memory" if rank.state == "out of memory" else plan_error(_held(rank), planned)
        cells = [_in(unit, planned), _in(unit, _held(rank)), off, *(_in(unit, one) for one in others)]
        rows.append([escape(rank_words(rank, rehearsal.world)), *cells])
    head = [unit_name, "planned", "rehearsed", "error", "reserved, planned", "reserved", "device"]
    return figure_of(drawn, "memory", legend_of(drawn[0].tints), _table(head, rows))


def _draw_memory(ranks: Sequence[RehearsedRank], rehearsal: Rehearsal, width: int) -> Bars:
    pairs = [(rank, *_stacks(rank)) for rank in ranks]
    stacks = [stack for _, planned, held in pairs for stack in (planned, held)]
    most, (unit, unit_name) = _most(ranks), size_unit(_most(ranks))
    named = [(name, value) for stack in stacks for name, value in stack.items()]
    tints = tints_of([name for name, _ in named], [value for _, value in named], most)
    left, scale = left_of(width), room_of(width) / (1.04 * most)
    y, drawn = 0.0, []
    for rank, planned, held in pairs:
        drawn.append(
            f'<text class="tick" x="{left}" y="{y + 12:.0f}">{escape(rank_words(rank, rehearsal.world))}</text>'
        )
        y += _LABEL
        for words, stack in (("planned", planned), ("rehearsed", held)):
            drawn.append(_bar(words, stack, tints, (left, y, scale), unit))
            y += _BAR + 2
        y += _GAP
    words = f"{unit_name} allocated at the peak: planned above, rehearsed below"
    drawn.append(axis_below(1.04 * most / unit, y, width, words))
    return Bars("Memory of each kind of rank", "".join(drawn), width, y + 36, tints)


def _most(ranks: Sequence[RehearsedRank]) -> float:
    """The longest bar, in bytes."""
    return max(1.0, *(sum(stack.values()) for rank in ranks for stack in _stacks(rank)))


def _held(rank: RehearsedRank) -> int:
    """What a rank held at its peak, or would have needed to; 0 if that is not known."""
    if rank.state == "out of memory":
        return rank.needed_bytes or 0
    return 0 if rank.memory is None else rank.memory.allocated_bytes


def _stacks(rank: RehearsedRank) -> tuple[dict[str, float], dict[str, float]]:
    """What a rank was planned to hold, and what it held."""
    memory = rank.memory
    planned = {name: one for name, one in memory.planned_terms.items() if one > 0} if memory is not None else {}
    held = {name: float(one) for name, one in memory.by_kind.items() if one > 0} if memory is not None else {}
    rest = _held(rank) - sum(held.values())
    name = "needed, out of memory" if rank.state == "out of memory" else "not attributed"
    return planned, held | ({name: rest} if rest > 0 else {})


def _in(unit: int, value: float | None) -> str:
    return "" if value is None else f"{value / unit:,.2f}"


def _bar(
    words: str,
    stack: Mapping[str, float],
    tints: Mapping[str, str],
    place: tuple[float, float, float],
    unit: int,
) -> str:
    x, y, scale = place
    drawn = []
    for name, value in stack.items():
        title = f"<title>{words}: {escape(name)}, {size(value)}</title>"
        box = f'x="{x:.1f}" y="{y:.0f}" width="{value * scale:.1f}" height="{_BAR}"'
        drawn.append(f'<rect class="{tints[name]}" {box}>{title}</rect>')
        x += value * scale
    total = f"{sum(stack.values()) / unit:.1f}" if stack else f"{words}: unknown"
    drawn.append(f'<text class="tick total" x="{x + 6:.1f}" y="{y + 12:.0f}">{total}</text>')
    return "".join(drawn)


def _step(step: RehearsedStep) -> str:
    """The step as one bar, its modelled phases paler, with a table."""
    phases = {name: spent for name, spent in step.phases_s.items() if spent > 0}
    whole = sum(phases.values())
    if whole <= 0:
        return ""
    tints = {name: f"time-{place % TIME_TINTS}" for place, name in enumerate(phases)}
    drawn = [_draw_step(step, phases, tints, width) for width in (WIDTH, NARROW)]
    rows = [
        [
            f'<i class="swatch {tints[name]}"></i>{escape(name)}',
            f"{1e3 * spent:,.2f}",
            _share(spent, whole),
            "modelled" if name in step.modelled else "measured",
        ]
        for name, spent in phases.items()
    ]
    rows.append(["measured", f"{1e3 * step.measured_s:,.2f}", _share(step.measured_s, step.step_s), ""])
    rows.append(["modelled", f"{1e3 * step.modelled_s:,.2f}", _share(step.modelled_s, step.step_s), ""])
    return figure_of(drawn, "breakdown", "", _table(["phase", "ms", "share", ""], rows, "phases"))


def _draw_step(step: RehearsedStep, phases: Mapping[str, float], tints: Mapping[str, str], width: int) -> Bars:
    whole, x = sum(phases.values()), float(left_of(width))
    scale, drawn = room_of(width) / whole, []
    for name, spent in phases.items():
        modelled = name in step.modelled
        words = f"{escape(name)}: {seconds(spent)}, {spent / whole:.1%}, {'modelled' if modelled else 'measured'}"
        box = f'x="{x:.1f}" y="6" width="{spent * scale:.1f}" height="40"'
        drawn.append(
            f'<rect class="{tints[name]}{" modelled" if modelled else ""}" {box}><title>{words}</title></rect>'
        )
        x += spent * scale
    drawn.append(axis_below(1e3 * whole, 46, width, "ms of a step; measured phases dark, modelled ones pale"))
    return Bars("Time of the cluster’s step", "".join(drawn), width, 82, tints)


def _compute(rehearsal: Rehearsal) -> str:
    """Every kind of rank's compute by phase."""
    ranks = [rank for rank in rehearsal.ranks[:_MOST_RANKS] if rank.state == "measured"]
    phases = list(dict.fromkeys(name for rank in ranks for name in rank.phases_s))
    if not phases:
        return ""
    rows = [
        [
            escape(rank_words(rank, rehearsal.world)),
            *(f"{1e3 * rank.phases_s.get(name, 0.0):,.2f}" for name in phases),
            f"{1e3 * rank.step_s:,.2f}",
        ]
        for rank in ranks
    ]
    table = _table(["ms", *map(escape, phases), "step"], rows)
    note = '<p class="note">Compute of one step, in which messages took no time.</p>'
    return f'<figure class="picture compute"><figcaption><h3>Compute by phase</h3></figcaption>{note}{table}</figure>'


def _messages(rank: RehearsedRank, rehearsal: Rehearsal) -> str:
    rows = [
        [
            escape(one.kind),
            escape(one.axis),
            f"{len(one.ranks):,}",
            size(one.bytes),
            f"{one.count:,}",
            size(one.bytes * one.count),
        ]
        for one in rank.messages[:_MOST_MESSAGES]
    ]
    left_out = len(rank.messages) - len(rows)
    note = f'<p class="note">{left_out:,} more are not shown.</p>' if left_out else ""
    title = escape(f"Messages of {rank_words(rank, rehearsal.world)} in one step")
    table = _table(["kind", "axis", "ranks", "each", "count", "in all"], rows)
    return f'<figure class="picture messages"><figcaption><h3>{title}</h3></figcaption>{table}{note}</figure>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """A table of cells that are HTML already; all columns but the first hold numbers."""
    columns = "".join(
        f'<th scope="col"{" class=number" if place else ""}>{name}</th>' for place, name in enumerate(head)
    )
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"""<td class="number">{cell}</td>""" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    table = f'<table class="{style}"><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Table, scrollable">{table}</div>'


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "—"
