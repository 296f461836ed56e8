"""A rehearsed rank against the same rank among real ones: what it holds and what it sends are equal.

The short form of `benchmarks/rehearse_real.py`, which does so for every rank of many more layouts.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rehearse_real import Compared, compare, evenly_routed, line

from meshwright.job import Job
from meshwright.verify import load_matrix

TRIES = 3


def compared(job: Job, ranks: list[int], tolerance: float) -> list[Compared]:
    """Ranks whose memory is equal at every block and phase.

    Only gloo's own threads may still hold what they have just sent or reduced; when they let go is chance, so what a
    real rank holds is the least of some tries.
    """
    found = compare(job, ranks)
    for _ in range(TRIES - 1):
        if all(one.within(tolerance) >= 0.9 for one in found):
            break
        found = [least(*pair) for pair in zip(found, compare(job, ranks), strict=True)]
    for one in found:
        assert one.samples and one.same_places
        assert all(own <= (1 + tolerance) * real for own, real in one.samples), one.samples
        assert one.within(tolerance) >= 0.9, one.samples
    return found


def least(one: Compared, again: Compared) -> Compared:
    pairs = zip(one.samples, again.samples, strict=True)
    return replace(one, samples=[(own, min(real, later)) for (own, real), (_, later) in pairs])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama · dp_shard 2, zero 1, accumulation 3", [1]),
        ("gpt2 · dp_shard 2, zero 2, accumulation 3", [0]),
        ("mistral · dp_shard 2, zero 3, sliding window", [1]),
        ("llama · tp 2", [1]),
        ("llama · cp 2", [1]),
        ("llama · cp 2, ulysses", [0]),
        ("qwen3 · pp 2, 1f1b, 5 micro-batches, 3 layers", [0, 1]),
        ("llama · dp_shard 2, pp 2, zero 2, zb-h1", [2]),
        ("moe-capacity · dp_shard 2, ep 2", [1]),
        ("moe · pp 2, dp_shard 2, ep 2", [3]),
        ("moe-shared · dp_shard 2, tp 2, ep 4, zero 3", [2]),
    ],
)
def test_a_rehearsed_rank_holds_and_sends_what_a_real_one_does(name: str, ranks: list[int]) -> None:
    for one in compared(line(name), ranks, 0.01):
        assert one.operations > 0 and one.same_messages, one.differing


@pytest.mark.thorough
def test_with_a_real_router_only_the_rows_to_experts_differ() -> None:
    """It sees other numbers than among real ranks, so that experts get only about as many tokens."""
    name = "moe · dp_shard 2, ep 2"
    [learned] = (one.job for one in load_matrix() if one.name == name)
    assert learned != evenly_routed(learned) == line(name)
    [one] = compared(learned, [1], 0.1)
    assert one.same_order and one.differing <= {"all_to_all_single"}
