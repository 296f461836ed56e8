"""How layers are shared out: balanced by cost, with the ends counted in."""

import tracemalloc
from itertools import combinations

import pytest

from meshwright.job.model import Model
from meshwright.job.presets import model_preset
from meshwright.layout.stages import balanced_counts, piece_costs


def costliest(counts: tuple[int, ...], shape: Model, sequence: int) -> float:
    layer, embedding, head = piece_costs(shape, sequence)
    costs = [layer * count for count in counts]
    costs[0] += embedding
    costs[-1] += head
    return max(costs)


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("vocabulary", [64, 5_000, 130_000])
def test_no_other_split_has_a_cheaper_costliest_stage(stages: int, vocabulary: int) -> None:
    shape = Model(vocab_size=vocabulary, width=256, layers=9, heads=4, ffn_width=1024)
    cuts = combinations(range(1, 9), stages - 1)
    every = [tuple(b - a for a, b in zip((0, *cut), (*cut, 9), strict=True)) for cut in cuts]
    counts = balanced_counts(shape, 512, stages)
    assert counts in every
    assert costliest(counts, shape, 512) == min(costliest(split, shape, 512) for split in every)


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    llama = Model(**model_preset("llama-3-8b"))
    counts = balanced_counts(llama, 8192, 4)
    assert sum(counts) == 32 and counts[-1] == min(counts) < counts[0]


def test_equal_costs_are_spread_evenly() -> None:
    shape = Model(vocab_size=2, width=1024, layers=10, heads=8, ffn_width=4096)
    assert sorted(balanced_counts(shape, 64, 4)) == [2, 2, 3, 3]


def test_a_block_of_an_extra_token_counts_on_the_last_stage() -> None:
    shape = Model(vocab_size=2, width=1024, layers=11, heads=8, ffn_width=4096, extra_tokens=1)
    assert balanced_counts(shape, 64, 4) == (3, 3, 3, 2)


def test_thousands_of_layers_are_balanced_without_listing_every_way() -> None:
    """All ways to cut 2,000 layers into three stages take more than 100 MB."""
    shape = Model(vocab_size=64_000, width=64, layers=2000, heads=1)
    tracemalloc.start()
    counts = balanced_counts(shape, 512, 3)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    layer = piece_costs(shape, 512)[0]
    assert sum(counts) == 2000
    # Moving a layer makes no stage cheaper than the costliest: this one is within a layer of the mean.
    assert costliest(counts, shape, 512) < sum(piece_costs(shape, 512)[1:], 2000 * layer) / 3 + layer
    assert peak_bytes < 10e6
