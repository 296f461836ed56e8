"""A budget is met by the cheapest choice of blocks: the quick way finds what trying all of them finds."""

from random import Random

from meshwright.layout.budget import (
    BlockBytes,
    StageBytes,
    cheapest,
    least_bytes,
    most_recomputed_bytes,
    peak_bytes,
    work,
)


def every_way(stages: list[StageBytes], holdings: list[tuple[int, ...]]) -> list[list[tuple[int, int, int]]]:
    """A single stage's blocks in each mode, all numbers of them."""
    [stage] = stages
    return [
        [(full, selective, stage.blocks - full - selective)]
        for full in range(stage.blocks + 1)
        for selective in range(stage.blocks - full + 1)
    ]


def test_the_cheapest_way_is_the_cheapest_of_all() -> None:
    random = Random(0)
    for _ in range(300):
        none = random.randint(20, 100)
        selective = random.randint(5, none)
        full = random.randint(1, selective)
        modes = {
            "none": BlockBytes(none),
            "selective": BlockBytes(selective, none - selective + random.randint(0, 5), random.choice([0, 3])),
            "full": BlockBytes(full, none - full, random.randint(4, 10)),
        }
        stages = [StageBytes(random.randint(1, 9), modes, random.randint(0, 5))]  # type: ignore[arg-type]
        holdings: list[tuple[int, ...]] = [(random.randint(1, 6),)]
        least, most = least_bytes(stages, holdings), peak_bytes(stages, [(0, 0, stages[0].blocks)], holdings)
        assert least <= most_recomputed_bytes(stages, holdings)
        for budget in (least - 1, least, (least + most) // 2, most):
            ways = [way for way in every_way(stages, holdings) if peak_bytes(stages, way, holdings) <= budget]
            found = cheapest(stages, holdings, budget)
            assert (found is None) == (not ways)
            assert found is None or work(stages, found) == min(work(stages, way) for way in ways)
