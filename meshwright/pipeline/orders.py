"""Looped schedules, whose stages go to ranks in turn: all are a warm-up of forwards, then one forward, one backward.

They differ in three numbers: how many stages a rank holds, how many forwards it runs ahead of its first backward, and,
where the backward is split, how many backwards its weight half lags behind.
"""

from itertools import zip_longest

from meshwright.pipeline.table import Action, Kind


def looped_stages(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage when stages are assigned to ranks in turn."""
    return tuple(stage % ranks for stage in range(ranks * virtual_stages))


def looped_order(schedule: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> tuple[Action, ...]:
    """The order in which a rank runs its actions under one of the looped schedules."""
    visits = [
        (group + index, chunk)
        for group in range(0, micro_batches, ranks)
        for chunk in range(virtual_stages)
        for index in range(min(ranks, micro_batches - group))
    ]
    last = virtual_stages - 1
    forwards = [Action(Kind.FORWARD, micro_batch, chunk * ranks + rank) for micro_batch, chunk in visits]
    backwards = [(micro_batch, (last - chunk) * ranks + rank) for micro_batch, chunk in visits]
    after = ranks - 1 - rank  # ranks between this one and the end of the line
    ahead = {
        "naive": 0,
        "gpipe": len(forwards),
        "1f1b": after,
        "pipedream": after,
        "zb-h1": after,
        # Once would do if transfers took no time; with twice, what they add does not grow with the micro-batches.
        "interleaved": 2 * after + last * ranks,
        "zb-interleaved": after + last * ranks,
    }[schedule]
    weight_lag = rank if schedule.startswith("zb-") else None
    return _warm_up_then_alternate(forwards, backwards, min(ahead, len(forwards)), weight_lag)


def _warm_up_then_alternate(
    forwards: list[Action], backwards: list[tuple[int, int]], ahead: int, weight_lag: int | None
) -> tuple[Action, ...]:
    order = forwards[:ahead]
    for number, (forward, backward) in enumerate(zip_longest(forwards[ahead:], backwards)):
        if forward:
            order.append(forward)
        if weight_lag is None:
            order.append(Action(Kind.BACKWARD, *backward))
            continue
        order.append(Action(Kind.INPUT, *backward))
        if number >= weight_lag:
            order.append(Action(Kind.WEIGHT, *backwards[number - weight_lag]))
    if weight_lag:
        order += [Action(Kind.WEIGHT, *backward) for backward in backwards[-weight_lag:]]
    return tuple(order)
