"""DualPipe and DualPipeV: two streams of micro-batches meet on every rank, one's forward overlaps the other's backward.

The order is the one DeepSeek published with DeepSeek-V3 (arXiv:2412.19437, and the DualPipe repository's figures).
DualPipeV is DualPipe cut in the middle: the second stream is the first one coming back on the second half of the V.
"""

from meshwright.pipeline.writer import RankOrder

NEAR, FAR = (
    0,
    1,
)  # the stream that enters at this rank's end of the pipeline, and the one that comes from beyond the fold


def two_stream_order(distance: int, half: int, stages: tuple[int, int], streams: tuple[range, range]) -> RankOrder:
    """The order of a rank `distance` ranks from its end of a pipeline that folds after `half` ranks.

    `stages` are its stages of the near and the far stream, `streams` their micro-batches.
    """
    order = RankOrder(stages, streams)
    to_fold, from_end = half - 1 - distance, distance + 1

    for _ in range(2 * to_fold):
        order.forward(NEAR)
    for _ in range(from_end):
        order.forward(NEAR)
        order.forward(FAR)
    for _ in range(to_fold):
        order.input(FAR)
        order.weight()
        order.forward(FAR)

    for _ in range(len(streams[NEAR]) - 2 * to_fold - from_end):
        order.overlap(NEAR, FAR)
        order.overlap(FAR, NEAR)
    for _ in range(to_fold):
        order.backward(FAR)
        order.overlap(FAR, NEAR)

    # No forwards left: halfway through the rest, gradients go first and weights fill the idle time.
    for number in range(2 * from_end):
        stream = NEAR if number % 2 else FAR
        if number < from_end:
            order.backward(stream)
        else:
            order.input(stream)
    for _ in range(to_fold):
        order.weight()
        order.input(NEAR)
    order.all_weights()
    return order
