"""The simulator equals the closed forms, keeps every dependency, and counts transfers, unequal stages and overlap."""

from itertools import pairwise, permutations, product

import pytest

from meshwright.pipeline import (
    SCHEDULES,
    Action,
    Kind,
    Simulation,
    StageTimes,
    Table,
    build_table,
    share_times,
    simulate,
)

# F, I and W with each of them the shortest, the middle and the longest, and all equal.
TIMES = [(1.0, 1.0, 1.0), *permutations((0.3, 1.0, 1.7))]
SIZES = [(1, 3), (2, 4), (4, 4), (4, 8), (5, 15), (8, 16)]


def run(name: str, p: int, m: int, v: int | None = None, **times: float) -> tuple[Table, Simulation]:
    table = build_table(name, p, m, v)
    return table, simulate(table, share_times(table, **times))


@pytest.mark.parametrize("p,m", SIZES)
@pytest.mark.parametrize("name,v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_bubble_of_schedules_with_whole_backwards(name: str, v: int, p: int, m: int) -> None:
    table = build_table(name, p, m, v)
    for forward, input_, weight in TIMES:
        whole = input_ + weight
        result = simulate(table, share_times(table, forward_s=forward, input_s=input_, weight_s=weight))
        assert result.bubble_s == pytest.approx((p - 1) * (forward + whole) / v, abs=1e-9)
        assert result.makespan_s == pytest.approx((m + (p - 1) / v) * (forward + whole), abs=1e-9)
        assert result.bubble_over_ideal == pytest.approx((p - 1) / (v * m), abs=1e-9)
        assert result.bubble_share_of_step == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)


@pytest.mark.parametrize("p,m", SIZES)
@pytest.mark.parametrize("name,v", [("zb-h1", 1), ("zb-interleaved", 2), ("zb-interleaved", 3)])
def test_bubble_of_schedules_with_split_backwards(name: str, v: int, p: int, m: int) -> None:
    """(p − 1)(F + I − W)/v where W is the shortest of the three; a longer W fills no more than F or I leave open."""
    table = build_table(name, p, m, v)
    for forward, input_, weight in TIMES:
        result = simulate(table, share_times(table, forward_s=forward, input_s=input_, weight_s=weight))
        filled = min(forward, input_, weight)
        assert result.bubble_s == pytest.approx((p - 1) * (forward + input_ - filled) / v, abs=1e-9)


@pytest.mark.parametrize("p,m", [(1, 2), (2, 4), (4, 8), (5, 12), (8, 16)])
def test_bubble_of_the_v(p: int, m: int) -> None:
    """With F = I = W, no schedule with a synchronous step does better: the last rank starts (p − 1) stages late."""
    for name in ("zb-v", "dualpipe-v"):
        assert run(name, p, m)[1].bubble_s == pytest.approx((p - 1) / 2, abs=1e-9)
    for forward, input_, weight in [(0.8, 0.9, 0.5), (1.0, 1.2, 0.8), (0.8, 1.5, 1.0), (1.0, 1.2, 1.2)]:
        result = run("zb-v", p, m, forward_s=forward, input_s=input_, weight_s=weight)[1]
        assert result.bubble_s == pytest.approx((p - 1) * input_ / 2, abs=1e-9)  # for F, W ≤ I ≤ 2W


@pytest.mark.parametrize("p,m", [(2, 4), (4, 8), (4, 14), (8, 16)])
def test_bubble_of_dualpipe(p: int, m: int) -> None:
    """(p/2 − 1)(F&B + B − 3W) for F, W ≤ I and pairs that gain nothing; less when they do or run one by one."""
    table = build_table("dualpipe", p, m)
    for forward, input_, weight in [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (0.8, 1.0, 0.5)]:
        whole = input_ + weight
        times = {"forward_s": forward, "input_s": input_, "weight_s": weight}

        def bubble(overlap: float | None, times: dict[str, float] = times) -> float:
            return simulate(table, share_times(table, **times, overlap=overlap)).bubble_s

        published = (p / 2 - 1) * (forward + whole + whole - 3 * weight)
        assert bubble(1.0) == pytest.approx(published, abs=1e-9)
        assert bubble(None) <= published + 1e-9
        shorter = (p / 2 - 1) * (0.8 * (forward + whole) + whole - 3 * weight)
        assert bubble(0.8) <= shorter + 1e-9
    assert run("dualpipe", p, m)[1].bubble_s == pytest.approx(p / 2 - 1, abs=1e-9)


def test_naive_uses_one_rank_at_a_time() -> None:
    result = run("naive", 4, 8, forward_s=1.0, input_s=0.7, weight_s=0.9)[1]
    assert result.makespan_s == pytest.approx(4 * 8 * 2.6, abs=1e-9)
    assert sum(result.busy_s) / (4 * result.makespan_s) == pytest.approx(1 / 4, abs=1e-9)


def depends_on(earlier: Action, later: Action) -> bool:
    """Whether one action of a micro-batch needs another of the same micro-batch."""
    letters = f"{earlier.kind}{later.kind}".replace("B", "I")
    distance = later.stage - earlier.stage
    return (letters, distance) in {("FF", 1), ("II", -1), ("FI", 0)} or (
        earlier.kind is Kind.INPUT and later.kind is Kind.WEIGHT and distance == 0
    )


@pytest.mark.parametrize("overlap", [None, 0.7])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_action_starts_before_what_it_needs(name: str, overlap: float | None) -> None:
    table = build_table(name, 4, 8)
    stages = range(table.stages)
    times = StageTimes(
        forward_s=[1.0 + 0.1 * stage for stage in stages],
        backward_s=[2.0 - 0.1 * stage for stage in stages],
        input_s=0.9,
        weight_s=[0.5 + 0.05 * stage for stage in stages],
        send_s=0.25,
        overlap=overlap,
    )
    result = simulate(table, times)
    assert len(result.spans) == sum(len(order) for order in table.orders)
    checked = 0
    for micro_batch in range(table.micro_batches):  # dualpipe's two streams share no micro-batch, so no stage either
        spans = [span for span in result.spans if span.action.micro_batch == micro_batch]
        for earlier, later in product(spans, spans):
            if depends_on(earlier.action, later.action):
                checked += 1
                sent = 0.25 if earlier.rank != later.rank else 0.0
                assert later.start_s >= earlier.end_s + sent - 1e-12
    of_each = table.stages // table.parameter_copies
    weights = sum(action.kind is Kind.WEIGHT for order in table.orders for action in order)
    assert checked == table.micro_batches * (2 * (of_each - 1) + of_each) + weights
    for rank in range(table.ranks):
        spans = result.spans_of(rank)
        assert tuple(span.action for span in spans) == table.orders[rank]
        for before, after in pairwise(spans):
            together = overlap is not None and (before.action, after.action) in table.overlapped
            assert after.start_s == before.start_s if together else after.start_s >= before.end_s
        assert result.busy_s[rank] + result.idle_s[rank] == pytest.approx(result.makespan_s)


def test_transfers_unequal_stages_and_overlap_by_hand() -> None:
    two = build_table("1f1b", 2, 1)
    times = StageTimes(forward_s=(1.0, 3.0), backward_s=(2.0, 5.0), input_s=0.0, weight_s=0.0, send_s=0.25)
    result = simulate(two, times)
    assert result.makespan_s == 1 + 0.25 + 3 + 5 + 0.25 + 2
    assert result.busy_s == (3.0, 8.0) and result.idle_s == (8.5, 3.5)
    assert result.ideal_s == 8.0 and result.bubble_s == 3.5  # over the busiest rank

    fold = build_table("zb-v", 1, 1)  # both stages on one rank: nothing is sent
    assert simulate(fold, StageTimes(1.0, 2.0, 1.0, 1.0, send_s=9.0)).makespan_s == 6.0

    table = build_table("dualpipe-v", 1, 2)
    apart = simulate(table, StageTimes(1.0, 2.0, 1.0, 1.0))
    together = simulate(table, StageTimes(1.0, 2.0, 1.0, 1.0, overlap=0.5))
    assert len(table.overlapped) == 2
    assert apart.makespan_s == 12.0 and together.makespan_s == 12.0 - len(table.overlapped) * 1.5


def test_transfers_are_paid_once_a_step_or_in_every_round() -> None:
    growing = set()
    for name in SCHEDULES:
        added = []
        for m in (8, 32):
            table = build_table(name, 4, m)
            free, paid = (simulate(table, share_times(table, send_s=send)) for send in (0.0, 0.1))
            added.append(paid.bubble_s - free.bubble_s)
        if added[1] > added[0] + 1e-9:
            growing.add(name)
        else:
            assert added[0] <= 1.6 + 1e-9
    assert growing == {"naive", "1f1b", "pipedream"}


def test_a_backward_given_whole_is_taken_whole() -> None:
    assert run("1f1b", 2, 2, forward_s=1.0, backward_s=1.5)[1].makespan_s == 3 * 2.5
    assert run("zb-h1", 2, 2, forward_s=1.0, backward_s=99.0)[1].makespan_s < 10
