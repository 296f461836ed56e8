"""Which blocks to recompute so that a rank stays within a budget: the cheapest number of blocks in each mode.

A stage's blocks are alike, so only their number in each mode matters; the stages of a rank share them evenly.
Within a stage recomputed blocks come first: the backward starts with the last blocks, and by the time it restores a
recomputed block's tensors, it has freed those of the blocks after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.cost import Mode

Holding = tuple[int, ...]
"""How many micro-batches each of a rank's stages holds at some moment."""
Counts = tuple[int, int, int]
"""Blocks in each mode, in this order."""
ORDER: tuple[Mode, ...] = ("full", "selective", "none")


@dataclass(frozen=True)
class BlockBytes:
    """A block of one micro-batch in one mode."""

    kept: int
    """Bytes held from forward to backward."""
    remade: int = 0
    """Bytes that its recomputation restores, besides those kept."""
    flops: int = 0
    """Recomputed FLOPs of projections and attention."""


@dataclass(frozen=True)
class StageBytes:
    """A stage of one micro-batch."""

    blocks: int
    modes: Mapping[Mode, BlockBytes]
    """What its blocks may do."""
    fixed: int = 0
    """Bytes held whatever the mode: embedding, head, what goes to the next stage."""

    def kept(self, counts: Counts) -> int:
        """Bytes held from forward to backward."""
        return self.fixed + sum(n * self.modes[mode].kept for mode, n in zip(ORDER, counts, strict=True) if n)

    def surplus(self, counts: Counts) -> int:
        """Most bytes the backward holds beyond that, when it restores a block's tensors."""
        most = freed = 0
        for mode, count in reversed(list(zip(ORDER, counts, strict=True))):
            if count:
                most = max(most, self.modes[mode].remade - freed)
                freed += count * self.modes[mode].kept
        return most


def cheapest(stages: Sequence[StageBytes], holdings: Sequence[Holding], budget: int) -> list[Counts] | None:
    """Every stage's blocks in each mode for which the rank recomputes least within the budget; None if none.

    Least is fewest FLOPs, and among equals fewest recomputed bytes.
    """
    total = sum(stage.blocks for stage in stages)
    allowed = stages[0].modes
    # With fewer blocks kept whole there is more to restore at once: at most this is gained by keeping some.
    restored = max(mode.remade for stage in stages for mode in stage.modes.values())
    best: list[Counts] | None = None
    for full in range(total + 1 if "full" in allowed else 1):
        rest = total - full if "selective" in allowed else 0
        if best is not None and work(stages, _way(stages, holdings, full, 0))[0] > work(stages, best)[0]:
            break  # more blocks in full only add
        if peak_bytes(stages, _way(stages, holdings, full, rest), holdings) - restored > budget:
            continue
        for selective in range(rest + 1):  # each recomputes more than the one before
            way = _way(stages, holdings, full, selective)
            if peak_bytes(stages, way, holdings) <= budget:
                best = way if best is None else min(best, way, key=lambda one: work(stages, one))
                break
    return best


def most_recomputed_bytes(stages: Sequence[StageBytes], holdings: Sequence[Holding]) -> int:
    """The peak with every block recomputed in full: a budget of so many bytes can be met."""
    return peak_bytes(stages, [(stage.blocks, 0, 0) for stage in stages], holdings)


def least_bytes(stages: Sequence[StageBytes], holdings: Sequence[Holding]) -> int:
    """The smallest possible peak."""
    return min(peak_bytes(stages, way, holdings) for way in _ways(stages, holdings))


def peak_bytes(stages: Sequence[StageBytes], way: Sequence[Counts], holdings: Sequence[Holding]) -> int:
    """Most bytes of activations a rank holds at once: its fullest moment, and one backward's surplus on top."""
    kept = [stage.kept(counts) for stage, counts in zip(stages, way, strict=True)]
    fullest = max(sum(held * size for held, size in zip(holding, kept, strict=True)) for holding in holdings)
    return fullest + max(stage.surplus(counts) for stage, counts in zip(stages, way, strict=True))


def work(stages: Sequence[StageBytes], way: Sequence[Counts]) -> tuple[int, int]:
    """What recomputing one micro-batch costs over a rank's stages: FLOPs, and bytes of recomputed tensors."""
    again = [
        (count * stage.modes[mode].flops, count * stage.modes[mode].remade)
        for stage, counts in zip(stages, way, strict=True)
        for mode, count in zip(ORDER, counts, strict=True)
        if count
    ]
    return sum(flops for flops, _ in again), sum(remade for _, remade in again)


def _ways(stages: Sequence[StageBytes], holdings: Sequence[Holding]) -> Iterator[list[Counts]]:
    """Every number of the rank's blocks in each mode, shared evenly by its stages."""
    total = sum(stage.blocks for stage in stages)
    allowed = stages[0].modes
    for full in range(total + 1 if "full" in allowed else 1):
        for selective in range(total - full + 1) if "selective" in allowed else (0,):
            yield _way(stages, holdings, full, selective)


def _way(stages: Sequence[StageBytes], holdings: Sequence[Holding], full: int, selective: int) -> list[Counts]:
    """So many of the rank's blocks in these modes, shared evenly by its stages."""
    sizes = [stage.blocks for stage in stages]
    # The remainder is recomputed where it frees most: in the stages that hold most micro-batches.
    fullest = sorted(range(len(stages)), key=lambda place: -max(holding[place] for holding in holdings))
    fulls = _shared(full, sizes, fullest)
    left = [size - count for size, count in zip(sizes, fulls, strict=True)]
    selectives = _shared(selective, left, fullest)
    nones = [size - count for size, count in zip(left, selectives, strict=True)]
    return list(zip(fulls, selectives, nones, strict=True))


def _shared(count: int, room: Sequence[int], order: Sequence[int]) -> list[int]:
    """`count` blocks over stages as evenly as their room allows, the first of the order first."""
    if len(room) == 1:
        return [min(count, room[0])]
    shares = [0] * len(room)
    while count:
        for place in order:
            if count and shares[place] < room[place]:
                shares[place] += 1
                count -= 1
    return shares
