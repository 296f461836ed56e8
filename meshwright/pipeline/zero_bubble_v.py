"""ZB-V (Qi et al., arXiv:2401.10241): two stages a rank, laid out as a V, with backwards in halves.

Stage r is rank r's on the way out, stage 2p − 1 − r on the way back. Take F, I and W as one tick each and follow the
first micro-batch: it reaches rank r at tick r and comes back at 2p − 1 − r; its gradient passes at 2p + r and again
at 4p − 1 − r. What fits between these ticks is the warm-up. It leaves every rank with 2p micro-batches of half-size
stages in flight, as much as 1F1B's first rank holds; from there on a forward takes the memory a weight half has freed.
"""

from meshwright.pipeline.table import Action
from meshwright.pipeline.writer import RankOrder

OUT, BACK = 0, 1


def zero_bubble_v_order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """A rank's order; fewer micro-batches than fill the V are the first ones of a table that is full."""
    count = max(micro_batches, 2 * ranks)
    order = RankOrder((rank, 2 * ranks - 1 - rank), (range(count), range(count)))
    to_fold = ranks - rank

    for _ in range(2 * to_fold - 1):
        order.forward(OUT)
    for _ in range(rank):
        order.forward(BACK)
        order.forward(OUT)
    for _ in range(to_fold):
        order.forward(BACK)
        order.input(BACK)
        order.weight()

    forwards_left = count - (2 * to_fold - 1) - rank
    for number in range(count - ranks):
        if number < forwards_left:
            order.forward(OUT)
        order.input(OUT)
        order.weight()
        order.forward(BACK)
        order.input(BACK)
        order.weight()

    # No forwards left: gradients other ranks wait for go first, weights fill the idle time and the end.
    for _ in range(rank):
        order.input(OUT)
        order.input(BACK)
    for _ in range(to_fold):
        order.input(OUT)
        order.weight()
    order.all_weights()
    return tuple(action for action in order.actions if action.micro_batch < micro_batches)
