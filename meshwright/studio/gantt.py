"""One step of a pipeline in time: who works on which micro-batch, and who waits."""

from html import escape

from meshwright.pipeline import Kind, Simulation, Span, Table

_WIDTH, _LEFT, _RIGHT, _TOP = 1080, 64, 12, 4
_MOST_RANKS = 16
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradient of the weights",
}


def gantt(table: Table, simulation: Simulation, micro_batches: int) -> str:
    """A row for every pipeline rank; a table with fewer than the step's micro-batches is said to be its beginning."""
    every = -(-table.ranks // _MOST_RANKS)
    ranks = list(range(0, table.ranks, every))
    row = 24 if len(ranks) <= 8 else 18
    scale = (_WIDTH - _LEFT - _RIGHT) / simulation.makespan_s
    drawn = []
    for place, rank in enumerate(ranks):
        y = _TOP + row * place
        drawn.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{y + row / 2 + 2:.0f}">{rank}</text>')
        drawn.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{row - 4}"/>')
        drawn += _bars(table, simulation.spans_of(rank), y, row - 4, scale)
    base = _TOP + row * len(ranks)
    drawn.append(
        f'<text class="unit" x="{_LEFT}" y="{base + 14}">0</text>'
        f'<text class="unit" text-anchor="end" x="{_WIDTH - _RIGHT}" y="{base + 14}">'
        f"{simulation.makespan_s * 1e3:,.1f} ms</text>"
    )
    kinds = [kind for kind in Kind if any(action.kind is kind for order in table.orders for action in order)]
    keys = "".join(f'<span><i class="swatch act-{kind.value}"></i>{_NAMES[kind]}</span>' for kind in kinds)
    title = "Pipeline schedule"
    return (
        f'<figure class="picture gantt"><figcaption><h3>{title}</h3></figcaption>'
        f'<p class="legend">{keys}<span><i class="swatch idle"></i>waiting</span></p>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}, scrollable">'
        f'<svg viewBox="0 0 {_WIDTH} {base + 20}" role="img" aria-label="{escape(_words(table))}">'
        f"{''.join(drawn)}</svg></div>"
        f'<p class="note foot">{escape(_note(table, simulation, micro_batches, every))}</p></figure>'
    )


def _bars(table: Table, spans: list[Span], y: int, height: int, scale: float) -> list[str]:
    stages = table.stages_of(spans[0].rank)
    numbered = (spans[0].end_s - spans[0].start_s) * scale > 11
    shapes: dict[str, list[str]] = {}
    texts = []
    for span in spans:
        x, width = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
        level = min(3, 4 * stages.index(span.action.stage) // len(stages))
        shape = f"M{x:.1f} {y}h{max(width - 0.6, 0.4):.1f}v{height}H{x:.1f}z"
        shapes.setdefault(f"act-{span.action.kind.value} level-{level}", []).append(shape)
        if numbered:
            at = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}"'
            texts.append(f'<text class="on level-{level}" text-anchor="middle" {at}>{span.action.micro_batch}</text>')
    return [f'<path class="{style}" d="{"".join(one)}"/>' for style, one in shapes.items()] + texts


def _words(table: Table) -> str:
    return f"Schedule {table.schedule} on {table.ranks} pipeline ranks with {table.micro_batches} micro-batches"


def _note(table: Table, simulation: Simulation, micro_batches: int, every: int) -> str:
    parts = [f"{table.schedule}, one row a pipeline rank" + (f" (every {every}th)" if every > 1 else "")]
    if table.virtual_stages > 1:
        parts.append(f"{table.virtual_stages} stages a rank, the first dark and the last light")
    if table.micro_batches < micro_batches:
        parts.append(
            f"the first {table.micro_batches} of {micro_batches} micro-batches, so that the bubble looks larger"
        )
    parts.append(f"waiting {simulation.bubble_share_of_step:.1%} of what is drawn")
    return "; ".join(parts) + "."
