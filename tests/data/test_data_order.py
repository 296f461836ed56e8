"""The keyed shuffle."""

import pytest
from counting import counted_calls

from meshwright.data.order import permute, window_of


@pytest.mark.parametrize("count", [*range(1, 40), 63, 64, 65, 255, 257, 1000, 4099])
@pytest.mark.parametrize("key", [0, 1, 2**63 + 5])
def test_bijection(count, key):
    assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


def test_huge_counts_take_a_few_calls_and_stay_inside():
    count = 10**12
    with counted_calls() as calls:
        places = [permute(i, count, key=3) for i in range(2000)]
    assert calls.count < 100 * 2000, calls
    assert len(set(places)) == 2000
    assert all(0 <= place < count for place in places)
    # Spread over the whole range, not bunched at one end.
    assert 0.45 < sum(places) / len(places) / count < 0.55


def test_index_outside_is_refused():
    with pytest.raises(IndexError):
        permute(5, 5, key=0)


def test_each_epoch_visits_every_window_in_its_own_order():
    epochs = [[window_of(epoch * 100 + i, 100, seed=7) for i in range(100)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [window_of(i, 100, seed=8) for i in range(100)]


def test_order_never_changes():
    # A saved position means these windows: another formula would silently repeat and skip data on resume.
    assert [window_of(i, 10, seed=42) for i in range(10)] == [9, 6, 2, 4, 0, 7, 8, 5, 1, 3]
