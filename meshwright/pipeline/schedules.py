"""The one function that builds a table, and its checks of the numbers."""

from dataclasses import dataclass
from functools import lru_cache

from meshwright.errors import UserError
from meshwright.pipeline.bidirectional import two_stream_order
from meshwright.pipeline.check import require_consistent
from meshwright.pipeline.orders import looped_order, looped_stages
from meshwright.pipeline.table import Table
from meshwright.pipeline.writer import RankOrder
from meshwright.pipeline.zero_bubble_v import zero_bubble_v_order


@dataclass(frozen=True)
class _Rule:
    """What a schedule requires of its numbers."""

    stages_per_rank: int
    """Its default number of stages per rank."""
    more_stages: bool = False
    """Whether a rank may hold more than that."""
    whole_rounds: bool = False
    """Whether micro-batches come in groups of one per rank."""
    full_v: bool = False
    """Whether it needs two micro-batches per rank to fill both directions."""
    two_copies: bool = False
    """Whether micro-batches enter at both ends, half of them each."""


_RULES = {
    "naive": _Rule(1),
    "gpipe": _Rule(1),
    "1f1b": _Rule(1),
    "interleaved": _Rule(2, more_stages=True, whole_rounds=True),
    "zb-h1": _Rule(1),
    "zb-interleaved": _Rule(2, more_stages=True, whole_rounds=True),
    "zb-v": _Rule(2),
    "dualpipe-v": _Rule(2, full_v=True),
    "dualpipe": _Rule(2, full_v=True, two_copies=True),
    "pipedream": _Rule(1),
}
SCHEDULES = tuple(_RULES)


def build_table(schedule: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Table:
    """The checked table of a schedule; `virtual_stages` stages per rank, by default the schedule's own number."""
    table = unchecked_table(schedule, ranks, micro_batches, virtual_stages)
    require_consistent(table)
    return table


@lru_cache(maxsize=512)
def unchecked_table(schedule: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Table:
    """The same without the check: for callers that only simulate it, which takes as long and fails alike, or that ask
    what kind of table it is."""
    require_schedule(schedule, ranks, micro_batches, virtual_stages)
    virtual_stages = virtual_stages or _RULES[schedule].stages_per_rank
    make = {"zb-v": _zero_bubble_v, "dualpipe-v": _dualpipe_v, "dualpipe": _dualpipe}.get(schedule, _looped)
    return make(schedule, ranks, micro_batches, virtual_stages)


def _looped(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> Table:
    orders = tuple(looped_order(schedule, rank, ranks, virtual_stages, micro_batches) for rank in range(ranks))
    stage_ranks = looped_stages(ranks, virtual_stages)
    chains = (range(len(stage_ranks)),)
    return Table(schedule, ranks, virtual_stages, micro_batches, orders, stage_ranks, chains)


def _zero_bubble_v(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> Table:
    orders = tuple(zero_bubble_v_order(rank, ranks, micro_batches) for rank in range(ranks))
    chains = (range(2 * ranks),)
    return Table(schedule, ranks, virtual_stages, micro_batches, orders, _there_and_back(ranks), chains)


def _dualpipe_v(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> Table:
    every = range(micro_batches)
    orders = [two_stream_order(rank, ranks, (rank, 2 * ranks - 1 - rank), (every, every)) for rank in range(ranks)]
    chains = (range(2 * ranks),)
    return _two_stream_table(schedule, micro_batches, virtual_stages, orders, chains)


def _dualpipe(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> Table:
    half = ranks // 2
    down, up = range(micro_batches // 2), range(micro_batches // 2, micro_batches)
    orders = [two_stream_order(rank, half, (rank, 2 * ranks - 1 - rank), (down, up)) for rank in range(half)]
    orders += [
        two_stream_order(ranks - 1 - rank, half, (2 * ranks - 1 - rank, rank), (up, down))
        for rank in range(half, ranks)
    ]
    chains = (range(ranks), range(ranks, 2 * ranks))
    return _two_stream_table(schedule, micro_batches, virtual_stages, orders, chains)


def _two_stream_table(
    schedule: str, micro_batches: int, virtual_stages: int, orders: list[RankOrder], chains: tuple[range, ...]
) -> Table:
    ranks = len(orders)
    actions = tuple(tuple(order.actions) for order in orders)
    overlapped = frozenset(pair for order in orders for pair in order.overlapped)
    return Table(schedule, ranks, virtual_stages, micro_batches, actions, _there_and_back(ranks), chains, overlapped)


def _there_and_back(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def require_schedule(schedule: str, ranks: int, micro_batches: int, virtual_stages: int | None) -> None:
    """Refuse numbers a schedule cannot run with, and say which would work."""
    if schedule not in _RULES:
        raise UserError(f'layout.schedule = "{schedule}" is not a schedule; set it to one of {", ".join(SCHEDULES)}')
    for field, value in (("layout.pp", ranks), ("micro-batches per step", micro_batches)):
        if value < 1:
            raise UserError(f"{field} = {value} is not possible; set it to 1 or more")
    rule = _RULES[schedule]
    _require_virtual_stages(schedule, rule, virtual_stages)
    if rule.two_copies and ranks % 2:
        raise UserError(
            f'layout.schedule = "{schedule}" feeds both ends of the pipeline and needs an even number of ranks, but '
            f'layout.pp = {ranks}; set layout.pp = {ranks + 1} or layout.schedule = "dualpipe-v"'
        )
    least = 2 * ranks if rule.full_v else 1
    multiple = ranks if rule.whole_rounds else 2 if rule.two_copies else 1
    if micro_batches < least or micro_batches % multiple:
        wanted = [f"a multiple of {multiple}"] if multiple > 1 else []
        wanted += [f"at least {least} (2 × layout.pp)"] if least > 1 else []
        fitting = max(-(-micro_batches // multiple) * multiple, least)
        raise UserError(
            f'layout.schedule = "{schedule}" with layout.pp = {ranks} needs micro-batches per step to be '
            f"{' and '.join(wanted)}, but batch.global_batch / (batch.micro_batch × data-parallel ranks) = "
            f"{micro_batches}; "
            f'set batch.global_batch so that it gives {fitting}, or layout.schedule = "{_alternative(schedule)}"'
        )


def _require_virtual_stages(schedule: str, rule: _Rule, virtual_stages: int | None) -> None:
    own = rule.stages_per_rank
    if virtual_stages is None or virtual_stages == own or (rule.more_stages and virtual_stages > own):
        return
    wanted = f"{own} or more" if rule.more_stages else f"{own}"
    other = ' or layout.schedule = "interleaved"' if own == 1 and virtual_stages > 1 else ""
    raise UserError(
        f'layout.virtual_stages = {virtual_stages} does not work with layout.schedule = "{schedule}"; '
        f"set layout.virtual_stages = {wanted}{other}"
    )


def _alternative(schedule: str) -> str:
    return {"interleaved": "1f1b", "zb-interleaved": "zb-h1"}.get(schedule, "zb-v")
