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
    ways = [way for way in _ways(stages, holdings) if peak_bytes(stages, way, holdings) <= budget]
    return min(ways, key=lambda way: work(stages, way), default=None)


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
    sizes, total = [stage.blocks for stage in stages], sum(stage.blocks for stage in stages)
    # The remainder is recomputed where it frees most: in the stages that hold most micro-batches.
    fullest = sorted(range(len(stages)), key=lambda place: -max(holding[place] for holding in holdings))
    allowed = stages[0].modes
    for full in range(total + 1 if "full" in allowed else 1):
        fulls = _shared(full, sizes, fullest)
        left = [size - count for size, count in zip(sizes, fulls, strict=True)]
        for selective in range(total - full + 1) if "selective" in allowed else (0,):
            selectives = _shared(selective, left, fullest)
            nones = [size - count for size, count in zip(left, selectives, strict=True)]
            yield list(zip(fulls, selectives, nones, strict=True))


def _shared(count: int, room: Sequence[int], order: Sequence[int]) -> list[int]:
    """`count` blocks over stages as evenly as their room allows, the first of the order first."""
    shares = [0] * len(room)
    while count:
        for place in order:
            if count and shares[place] < room[place]:
                shares[place] += 1
                count -= 1
    return shares
