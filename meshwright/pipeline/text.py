"""A simulated table as lines of text: a column is a moment, a row is a rank."""

from collections.abc import Sequence

from meshwright.pipeline.simulate import Simulation, Span
from meshwright.pipeline.table import Table

IDLE = "·"
BOTH = "&"  # an overlapped forward and backward
_LONGEST = 2.0  # times the shortest: a longer one would compress all others


def gantt_lines(table: Table, simulation: Simulation, column_s: float) -> list[tuple[str, str]]:
    """For every rank, a line of letters and below it a line of micro-batch numbers (their last digit).

    The letter is the action's; a rank's second and later stages have lowercase letters.
    """
    return [_rank_lines(table, rank, simulation.spans_of(rank), column_s) for rank in range(table.ranks)]


def column_time(simulations: Sequence[Simulation], columns: int) -> float:
    """The shortest action's time, or more where the common time would not fit into that many columns."""
    shortest = min(span.end_s - span.start_s for simulation in simulations for span in simulation.spans)
    return max(shortest, common_time(simulations) / columns)


def common_time(simulations: Sequence[Simulation]) -> float:
    """The time that drawings of several tables share; one that lasts much longer than the others is cut there."""
    shortest = min(simulation.makespan_s for simulation in simulations)
    return max(one.makespan_s for one in simulations if one.makespan_s <= _LONGEST * shortest)


def _rank_lines(table: Table, rank: int, spans: list[Span], column_s: float) -> tuple[str, str]:
    first_stage = table.stages_of(rank)[0]
    letters, numbers = "", ""
    for index, span in enumerate(spans):
        if index and span.start_s == spans[index - 1].start_s:  # the other half of a pair that overlaps
            begin = _column(span.start_s, column_s)
            letters = letters[:begin] + BOTH * (len(letters) - begin)
            continue
        begin, end = _column(span.start_s, column_s), _column(span.end_s, column_s)
        letter = span.action.kind.value
        letters = letters.ljust(begin, IDLE)[:begin]
        letters += (letter if span.action.stage == first_stage else letter.lower()) * (end - begin)
        numbers = (numbers.ljust(begin)[:begin] + str(span.action.micro_batch % 10)[: end - begin]).ljust(end)
    return letters, numbers


def _column(at_s: float, column_s: float) -> int:
    return round(at_s / column_s)
