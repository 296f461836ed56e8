"""What a chart is made of: ticks, thinning, smoothing, numbers."""

from typing import Any

import pytest

from meshwright.studio.chart import Series, line_chart, nice_ticks
from meshwright.studio.curves import curve, finite, smooth, thin
from meshwright.studio.numbers import count, duration, exact, short


@pytest.mark.parametrize(
    ("low", "high", "wanted", "ticks"),
    [
        (0, 10, 5, (0, 2, 4, 6, 8, 10)),
        (2.31, 2.49, 4, (2.35, 2.4, 2.45)),
        (0, 3e-4, 3, (0, 1e-4, 2e-4, 3e-4)),
        (-1, 1, 4, (-1, -0.5, 0, 0.5, 1)),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, wanted: int, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(low, high, wanted) == pytest.approx(ticks)


def test_thinning_keeps_extremes_order_and_gaps() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_000)]
    points[1234] = (1234.0, -50.0)
    points[8765] = (8765.0, 99.0)
    whole = [*points[:4000], *((float(step), None) for step in range(4000, 5000)), *points[5000:]]
    thinned = thin(whole)
    assert len(thinned) <= 1000
    assert (1234.0, -50.0) in thinned and (8765.0, 99.0) in thinned
    assert [step for step, _ in thinned] == sorted(step for step, _ in thinned)
    assert any(value is None for _, value in thinned)
    assert thin(points[:900]) == points[:900]


def test_smoothing_does_not_lag_and_passes_over_gaps() -> None:
    line = [(float(step), 3.0 * step) for step in range(1000)]
    assert finite(smooth(line)) == pytest.approx([3.0 * step for step in range(1000)])
    gap = [*line[:500], (500.0, None), *line[501:]]
    assert smooth(gap)[500] == (500.0, None) and smooth(gap)[300][1] == pytest.approx(900.0)
    assert smooth(line[:5]) == []


def test_curves_take_the_last_row_of_a_step_in_order() -> None:
    rows: list[dict[str, Any]] = [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 6.0}]
    rows += [{"step": 2, "loss": 4.0}, {"step": 3, "loss": None}]
    assert curve(rows, "loss", 2.0) == [(1, 12.0), (2, 8.0)]
    assert curve([{"step": 1, "loss": float("nan")}], "loss") == [(1, None)]


def test_a_wide_range_is_drawn_on_a_log_axis() -> None:
    figure = line_chart("Norm", "units", [Series("norm", "plain", [(1, 0.01), (2, 1.0), (3, 100.0)])])
    assert "units, log scale" in figure
    heights = [float(pair.split()[1]) for pair in figure.split(' d="M')[1].split('"')[0].split("L")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert "log scale" not in line_chart("Norm", "units", [Series("norm", "plain", [(1, -1.0), (2, 100.0)])])


@pytest.mark.parametrize("value", [0.0, 2.5, -3.0, 1e-9, 1e12])
def test_a_constant_curve_has_an_axis(value: float) -> None:
    assert "<svg" in line_chart("Flat", "u", [Series("flat", "plain", [(1, value), (2, value)])])


def test_numbers_as_people_read_them() -> None:
    assert [short(v) for v in (0, 950, 1500, 12_500, 3.2e6, 0.0123, 3e-4, 989.4e12)] == [
        "0", "950", "1.5k", "12.5k", "3.2M", "0.0123", "3e-4", "989.4T",
    ]  # fmt: skip
    assert [exact(v) for v in (10000.0, 0.1, 1e-5, 3e-4, 0.95)] == ["10,000", "0.1", "1e-5", "0.0003", "0.95"]
    assert [count(v) for v in (512, 22_123_456, 1_235_814_400, 999_999)] == ["512", "22.1M", "1.24B", "1M"]
    assert [duration(v) for v in (4.2, 200, 7500, 200_000)] == ["4.2 s", "3 min 20 s", "2 h 05 min", "2 d 07 h"]
