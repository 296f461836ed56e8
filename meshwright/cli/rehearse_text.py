"""A rehearsal as text for a terminal of 80 columns."""

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from meshwright.amounts import size, size_unit
from meshwright.rehearse import Messages, RankMemoryUse, Rehearsal, RehearsedRank, RehearsedStep
from meshwright.rehearse.words import plan_error, planned_kinds, rank_words, seconds, shortage

WIDTH = 80
_KERNELS = 20


def rehearsal_text(rehearsal: Rehearsal) -> str:
    """Every kind of rank, then the step that they make, warnings, and what a rehearsal cannot show."""
    where = f", for {rehearsal.cluster}" if rehearsal.cluster else ""
    parts = [_wrapped(f"rehearsed on {rehearsal.device}, torch {rehearsal.torch}{where}")]
    parts += [_rank(rank, rehearsal) for rank in rehearsal.ranks]
    if rehearsal.step is not None:
        parts.append(_step(rehearsal.step, rehearsal))
    parts.append([line for warning in rehearsal.warnings for line in _wrapped(f"warning: {warning}")])
    if rehearsal.limits:
        limits = [line for limit in rehearsal.limits for line in _wrapped(f"- {limit}")]
        parts.append(["what a rehearsal cannot show:", *limits])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _rank(rank: RehearsedRank, rehearsal: Rehearsal) -> list[str]:
    if rank.state == "out of memory":
        lines = _wrapped(f"out of memory: {shortage(rank, rehearsal)}")
        return lines if rank.memory is None else [*lines, "", *_memory(rank.memory)]
    alike = "" if rank.alike == 1 else f", as {rank.alike} ranks hold and compute"
    lines = _wrapped(f"{rank_words(rank, rehearsal.world)}{alike}")
    if rank.memory is not None:
        lines += ["", *_memory(rank.memory)]
    lines += ["", *_compute(rank)]
    lines += ["", *_messages(rank.messages)]
    if rank.kernels is not None:
        lines += ["", *_kernels(rank.kernels)]
    if rank.checkpoint_bytes is not None:
        took = "" if rank.checkpoint_s is None else f" in {seconds(rank.checkpoint_s)}"
        lines += ["", f"its share of a checkpoint: {size(rank.checkpoint_bytes)}, written{took}"]
    return lines


def _memory(memory: RankMemoryUse) -> list[str]:
    unit, name = size_unit(memory.allocated_bytes)
    kinds = planned_kinds(memory.planned_terms)
    pairs: list[tuple[str, float | None, float | None]] = [
        *(
            (f"  {kind}", memory.by_kind.get(kind), kinds.get(kind))
            for kind in dict.fromkeys([*memory.by_kind, *kinds])
        ),
        ("allocated at the peak", memory.allocated_bytes, memory.planned_bytes),
        ("reserved by the allocator", memory.reserved_bytes, memory.planned_reserved_bytes),
        ("used on the device", memory.device_bytes, None),
    ]
    rows = [
        [
            what,
            *("" if one is None else f"{one / unit:,.2f}" for one in (measured, planned)),
            plan_error(measured or 0.0, planned),
        ]
        for what, measured, planned in pairs
        if measured or planned
    ]
    lines = _table([f"memory, {name}", "rehearsed", "planned", "error"], rows)
    terms = ", ".join(f"{term} {planned / unit:,.2f}" for term, planned in memory.planned_terms.items() if planned)
    return lines + (_wrapped(f"planned terms: {terms}") if terms else [])


def _compute(rank: RehearsedRank) -> list[str]:
    total = sum(rank.phases_s.values())
    rows = [[f"  {phase}", _ms(spent), f"{spent / total:.1%}"] for phase, spent in rank.phases_s.items() if spent > 0]
    head = [f"compute of a step, median of {rank.steps}, messages taking no time", _ms(rank.step_s), ""]
    lines = _table(head, rows)
    if rank.actions_s:
        actions = ", ".join(f"{action} {seconds(spent)}" for action, spent in rank.actions_s.items())
        lines += _wrapped(f"one action of the schedule: {actions}")
    return lines


def _messages(messages: Sequence[Messages]) -> list[str]:
    if not messages:
        return ["it sends and receives nothing"]
    rows = [
        [one.kind, one.axis, f"{len(one.ranks):,}", size(one.bytes), f"{one.count:,}", size(one.bytes * one.count)]
        for one in messages
    ]
    return _table(["messages of a step", "axis", "ranks", "each", "count", "in all"], rows, words=2)


def _kernels(kernels: dict[str, Any]) -> list[str]:
    """A step's time by kind of kernel, and the longest of them."""
    kinds = ", ".join(f"{kind} {_ms(spent)}" for kind, spent in kernels["kinds_s"].items())
    rows = [
        [one["name"], one["kind"], f"{one['calls']:,.0f}", _ms(one["seconds"])] for one in kernels["top"][:_KERNELS]
    ]
    return [*_wrapped(f"kernels: {kinds}"), *_table(["the longest", "kind", "calls", "time"], rows, words=2)]


def _step(step: RehearsedStep, rehearsal: Rehearsal) -> list[str]:
    planned = "" if step.planned_s is None else f", planned {seconds(step.planned_s)}"
    off = plan_error(step.step_s, step.planned_s)
    head = f"the step on {rehearsal.cluster}: {seconds(step.step_s)}{planned}{f' ({off})' if off else ''}"
    lines = _wrapped(f"{head}; {step.tokens_per_s:,.0f} tokens/s on {rehearsal.world} ranks")
    rows = [
        [f"  {phase}", _ms(spent), _share(spent, step.step_s), "modelled" if phase in step.modelled else "measured"]
        for phase, spent in step.phases_s.items()
        if spent > 0
    ]
    for what, spent in (("measured", step.measured_s), ("modelled", step.modelled_s)):
        rows.append([what, _ms(spent), _share(spent, step.step_s), ""])
    return [*lines, *_table(["", "time", "share", ""], rows)]


def _ms(spent: float) -> str:
    """In one unit for all rows of a table."""
    return f"{1e3 * spent:,.2f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Columns as wide as they need to be, the first few of words to the left and all others to the right; what would
    be wider than a terminal is cut in the first column."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    first = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], first)
    lines = []
    for row in cells:
        row[0] = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        shown = [
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(shown).rstrip())
    return [line for line in lines if line]


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent="  ", break_long_words=True)
