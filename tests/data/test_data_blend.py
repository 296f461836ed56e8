"""Weighted turns: every source within one sample of its weight at every prefix, through stages, at any position."""

from fractions import Fraction

import numpy as np
import pytest
from counting import counted_calls
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.blend import LONGEST_PERIOD, Blend, turns_of

Stages = list[tuple[int, tuple[float, ...]]]


def worst_lag(blend: Blend, samples: int) -> float:
    """How far any source is from its share at any prefix; checks on the way that turns are numbered without gaps."""
    order = np.array([blend.place(sample) for sample in range(samples)])
    stage_of = np.searchsorted([start for start, _ in blend.shares], np.arange(samples), side="right") - 1
    rates = np.array([[count / sum(turns) for count in turns] for _, turns in blend.shares])
    had, due = np.eye(rates.shape[1])[order[:, 0]].cumsum(axis=0), rates[stage_of].cumsum(axis=0)
    assert np.array_equal(had[np.arange(samples), order[:, 0]], order[:, 1] + 1)
    assert blend.given(samples) == tuple(had[-1])
    return float(np.abs(had - due).max())


@pytest.mark.thorough
def test_a_million_samples_of_70_20_10():
    blend = Blend([(0, (0.7, 0.2, 0.1))])
    assert worst_lag(blend, 10**6) < 1
    assert blend.given(10**6) == (700_000, 200_000, 100_000)


@pytest.mark.thorough
def test_a_million_samples_of_a_mixture_in_stages():
    stages = [(0, (0.7, 0.2, 0.1)), (333_337, (0.25, 0.25, 0.5)), (600_001, (0, 0.9999, 0.0001)), (900_000, (1, 1, 1))]
    assert worst_lag(Blend(stages), 10**6) < 1 - 1e-9


@st.composite
def mixtures(draw: st.DrawFn) -> Stages:
    sources = draw(st.integers(1, 6))
    weights = st.lists(st.integers(0, 20), min_size=sources, max_size=sources).filter(any)
    starts = [0, *np.cumsum(draw(st.lists(st.integers(1, 150), max_size=3))).tolist()]
    return [(start, tuple(draw(weights))) for start in starts]


@settings(max_examples=150, deadline=None)
@given(mixtures())
@example([(0, (9, 8, 1)), (7, (0, 1, 20)), (9, (1, 0, 0))])
def test_any_mixture_stays_within_one_sample(stages: Stages):
    assert worst_lag(Blend(stages), stages[-1][0] + 300) < 1 - 1e-9


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e6)), min_size=1, max_size=20).filter(any))
def test_weights_become_turns_of_a_short_period(weights: list[float]):
    turns = turns_of(weights)
    assert sum(turns) <= LONGEST_PERIOD
    for weight, count in zip(weights, turns, strict=True):
        assert (count > 0) == (weight > 0)
        # Tiny weights are given a turn, which the others pay for.
        share = Fraction(str(weight)) / sum(Fraction(str(each)) for each in weights)
        assert abs(Fraction(count, sum(turns)) - share) <= Fraction(len(weights), LONGEST_PERIOD)


@pytest.mark.parametrize(
    ("weights", "turns"),
    [((0.7, 0.2, 0.1), (7, 2, 1)), ((2, 1), (2, 1)), ((1e-9, 1.0), (1, 65535)), ((3.0, 0.0), (1, 0))],
)
def test_exact_weights_have_the_shortest_period(weights, turns):
    assert turns_of(weights) == turns


def test_the_far_end_of_a_stream_is_as_near_as_its_beginning():
    with counted_calls() as calls:
        blend = Blend([(0, (0.123457, 0.3, 0.576543)), (10**11 + 7, (0.5, 0.25, 0.25))])
        source, number = blend.place(10**12)
    assert calls.count < 2_000_000, calls
    assert abs(sum(blend.given(10**12)) - 10**12) == 0
    assert blend.given(10**12)[source] == number
