"""The short form of the torture: kills at random and inside every part of a save, alone and with two ranks."""

from pathlib import Path

import pytest
from checkpoint_torture import STEPS, WORST, torture


@pytest.mark.parametrize(("ranks", "moments"), [pytest.param(1, 16, marks=pytest.mark.thorough), (2, 4)])
def test_killed_and_resumed_a_run_gives_the_bits_of_one_left_alone(tmp_path: Path, ranks: int, moments: int) -> None:
    result = torture(tmp_path, moments, ranks, seed=ranks)
    assert result["moments"] == moments
    assert result["rows_that_differ"] == 0 and result["rows_compared"] >= STEPS
    if ranks == 1:
        assert set(WORST) <= set(result["by_point"])
