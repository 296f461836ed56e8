"""The timeline of one pipeline step: which rank works on which micro-batch, and which waits."""

from html import escape

from meshwright.pipeline import KIND_NAMES, Frame, Kind, Simulation, Table, draw_axis, draw_ranks

_WIDTH, _LEFT, _RIGHT, _TOP = 1080, 64, 12, 4
_MOST_RANKS = 16


def gantt(table: Table, simulation: Simulation, micro_batches: int) -> str:
    """A row for every pipeline rank; a note says if the table shows only the first micro-batches of the step."""
    every = -(-table.ranks // _MOST_RANKS)
    labels = {rank: str(rank) for rank in range(0, table.ranks, every)}
    scale = (_WIDTH - _LEFT - _RIGHT) / simulation.makespan_s
    frame = Frame(_LEFT, scale, simulation.makespan_s, row=24 if len(labels) <= 8 else 18)
    base = _TOP + frame.row * len(labels)
    drawn = draw_ranks(table, simulation, labels, frame, _TOP) + draw_axis(frame, base, "ms", 1e3)
    kinds = [kind for kind in Kind if any(action.kind is kind for order in table.orders for action in order)]
    keys = "".join(f'<span><i class="swatch act-{kind.value}"></i>{KIND_NAMES[kind]}</span>' for kind in kinds)
    title = "Pipeline schedule"
    return (
        f'<figure class="picture gantt"><figcaption><h3>{title}</h3></figcaption>'
        f'<p class="legend">{keys}<span><i class="swatch idle"></i>waiting</span></p>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}, scrollable">'
        f'<svg viewBox="0 0 {_WIDTH} {base + 26}" role="img" aria-label="{escape(_words(table))}">'
        f"{drawn}</svg></div>"
        f'<p class="note foot">{escape(_note(table, simulation, micro_batches, every))}</p></figure>'
    )


def _words(table: Table) -> str:
    return f"Schedule {table.schedule} on {table.ranks} pipeline ranks with {table.micro_batches} micro-batches"


def _note(table: Table, simulation: Simulation, micro_batches: int, every: int) -> str:
    parts = [f"{table.schedule}, one row per pipeline rank" + (f" (every {every}th)" if every > 1 else "")]
    if table.virtual_stages > 1:
        parts.append(f"{table.virtual_stages} stages per rank, from dark (first) to light (last)")
    if table.micro_batches < micro_batches:
        parts.append(f"the first {table.micro_batches} of {micro_batches} micro-batches, so the bubble looks larger")
    parts.append(f"waiting for {simulation.bubble_share_of_step:.1%} of the time shown")
    return "; ".join(parts) + "."
