"""Tables: each can run, holds what it should, and a broken one is found."""

from dataclasses import replace

import pytest

from meshwright.errors import UserError
from meshwright.pipeline import SCHEDULES, Action, Kind, Table, build_table, require_consistent, require_schedule

SIZES = [(1, 2), (2, 4), (3, 6), (4, 8), (4, 20), (6, 12), (8, 32)]


def tables() -> list[Table]:
    return [build_table(name, p, m) for name in SCHEDULES for p, m in SIZES if not (name == "dualpipe" and p % 2)]


@pytest.mark.parametrize("table", tables(), ids=lambda table: f"{table.schedule}-{table.ranks}-{table.micro_batches}")
def test_every_table_is_whole_and_its_ends_run_in_order(table: Table) -> None:
    require_consistent(table)
    for stage in range(table.stages):
        own = [action for action in table.orders[table.stage_ranks[stage]] if action.stage == stage]
        for kind in Kind:
            numbers = [action.micro_batch for action in own if action.kind is kind]
            assert numbers == sorted(numbers)
        assert [action.micro_batch for action in own if action.kind is Kind.FORWARD] == [*table.micro_batches_of(stage)]
    assert table.stages == table.ranks * table.virtual_stages
    assert [len(table.stages_of(rank)) for rank in range(table.ranks)] == [table.virtual_stages] * table.ranks


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-v", "pipedream"])
def test_schedules_without_a_rule_take_any_number_of_micro_batches(name: str) -> None:
    for p in (1, 2, 3, 5, 8):
        for m in (1, 2, 3, 7, 11):
            assert build_table(name, p, m).micro_batches == m


def test_where_stages_are() -> None:
    assert build_table("interleaved", 3, 6, 2).stage_ranks == (0, 1, 2, 0, 1, 2)
    assert build_table("zb-v", 3, 6).stage_ranks == (0, 1, 2, 2, 1, 0)
    both_ways = build_table("dualpipe", 4, 8)
    assert both_ways.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert both_ways.chains == (range(4), range(4, 8)) and both_ways.stages_of(1) == (1, 6)
    assert [*both_ways.micro_batches_of(2)] == [0, 1, 2, 3] and [*both_ways.micro_batches_of(5)] == [4, 5, 6, 7]


def letters(table: Table, rank: int) -> str:
    return " ".join(f"{action.kind.value}{action.micro_batch}" for action in table.orders[rank])


def test_orders_that_can_be_checked_by_eye() -> None:
    assert letters(build_table("naive", 2, 2), 0) == "F0 B0 F1 B1"
    assert letters(build_table("gpipe", 2, 2), 1) == "F0 F1 B0 B1"
    assert letters(build_table("1f1b", 3, 4), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert letters(build_table("1f1b", 3, 4), 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert letters(build_table("zb-h1", 3, 4), 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    assert letters(build_table("pipedream", 3, 4), 1) == letters(build_table("1f1b", 3, 4), 1)


@pytest.mark.parametrize("p,m", [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_activations_in_flight(p: int, m: int) -> None:
    ranks = range(p)
    for v in (2, 3):
        wanted = tuple(2 * (p - r - 1) + (v - 1) * p + 1 for r in ranks)
        assert build_table("interleaved", p, m, v).in_flight == wanted
        assert max(build_table("zb-interleaved", p, m, v).in_flight) == v * p
    assert build_table("naive", p, m).in_flight == (1,) * p
    assert build_table("gpipe", p, m).in_flight == (m,) * p
    assert build_table("1f1b", p, m).in_flight == tuple(p - r for r in ranks)
    assert build_table("zb-h1", p, m).in_flight == (p,) * p
    assert build_table("zb-h1", p, m).in_flight_input == tuple(p - r for r in ranks)
    assert build_table("zb-v", p, m).in_flight == (2 * p,) * p  # of stages half the size
    assert build_table("dualpipe-v", p, m).in_flight == (2 * p + 1,) * p
    assert build_table("dualpipe", p, m).in_flight == (p + 1,) * p
    assert build_table("pipedream", p, m).weight_versions == tuple(min(m, p - r) for r in ranks)
    assert build_table("pipedream", p, 1).weight_versions == (1,) * p


def test_parameters_and_transfers() -> None:
    p, m = 4, 8
    sent = {name: build_table(name, p, m).transfers for name in SCHEDULES}
    once = 2 * m * (p - 1)
    assert {name for name, count in sent.items() if count == once} == {
        "naive", "gpipe", "1f1b", "zb-h1", "dualpipe", "pipedream",
    }  # fmt: skip
    assert sent["interleaved"] == sent["zb-interleaved"] == 2 * m * (2 * p - 1)
    assert sent["zb-v"] == sent["dualpipe-v"] == 2 * once  # the fold of the V stays on one rank
    copies = {name: build_table(name, p, m).parameter_copies for name in SCHEDULES}
    assert [name for name, count in copies.items() if count == 2] == ["dualpipe"]
    split = {name for name in SCHEDULES if build_table(name, p, m).splits_backward}
    assert split == {"zb-h1", "zb-interleaved", "zb-v", "dualpipe-v", "dualpipe"}


def swapped(table: Table, rank: int, first: Action, second: Action) -> Table:
    order = [second if action == first else first if action == second else action for action in table.orders[rank]]
    return replace(table, orders=(*table.orders[:rank], tuple(order), *table.orders[rank + 1 :]))


def test_broken_tables_are_found() -> None:
    table = build_table("zb-h1", 2, 3)
    first, second = Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0)
    late_input = swapped(table, 1, Action(Kind.INPUT, 1, 1), Action(Kind.WEIGHT, 1, 1))
    waits_for_itself = swapped(table, 0, first, Action(Kind.INPUT, 0, 0))
    # Rank 1 wants micro-batch 2 first, which rank 0 does not send before it has a gradient of micro-batch 0 back.
    crossed = swapped(build_table("1f1b", 2, 3), 1, Action(Kind.FORWARD, 0, 1), Action(Kind.FORWARD, 2, 1))
    for broken in (late_input, waits_for_itself, crossed):
        with pytest.raises(ValueError, match="deadlocks: rank"):
            require_consistent(broken)
    with pytest.raises(ValueError, match="runs F0 of stage 0 0 times instead of 1"):
        require_consistent(replace(table, orders=(table.orders[0][1:], table.orders[1])))
    with pytest.raises(ValueError, match="runs F1 of stage 0 2 times instead of 1"):
        require_consistent(replace(table, orders=((*table.orders[0], second), table.orders[1])))
    with pytest.raises(ValueError, match="runs F9 of stage 0 1 times instead of 0"):
        require_consistent(replace(table, orders=((*table.orders[0], Action(Kind.FORWARD, 9, 0)), table.orders[1])))
    with pytest.raises(ValueError, match="F0 of stage 1 on rank 0, which does not hold that stage"):
        require_consistent(replace(table, orders=table.orders[::-1]))
    with pytest.raises(ValueError, match="not neighbours"):
        require_consistent(replace(table, overlapped=frozenset({(first, Action(Kind.INPUT, 2, 0))})))


def test_an_overlapped_pair_counts_as_one_step_when_deadlocks_are_sought() -> None:
    table = build_table("1f1b", 2, 2)
    # Rank 0's F1 and B0 at the same time would need rank 1's B0 first, which is there; rank 1's F1 with B0 is not.
    pair = (Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 0, 0))
    require_consistent(replace(table, overlapped=frozenset({pair})))
    own = (Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 1))
    with pytest.raises(ValueError, match="deadlocks: rank 0 at F1 of stage 0, rank 1 at F0 of stage 1"):
        require_consistent(replace(table, overlapped=frozenset({pair, own})))


REFUSALS = {
    ("interleaved", 4, 6, None): ["a multiple of 4", "data-parallel ranks) = 6", "gives 8", '"1f1b"'],
    ("zb-interleaved", 4, 6, 2): ["a multiple of 4", '"zb-h1"'],
    ("interleaved", 4, 8, 1): ["layout.virtual_stages = 1", "layout.virtual_stages = 2 or more"],
    ("1f1b", 4, 8, 2): ["layout.virtual_stages = 2", "layout.virtual_stages = 1", '"interleaved"'],
    ("zb-v", 4, 8, 3): ["layout.virtual_stages = 3", "layout.virtual_stages = 2"],
    ("dualpipe-v", 4, 7, None): ["at least 8 (2 × layout.pp)", "= 7;", "gives 8", '"zb-v"'],
    ("dualpipe", 3, 8, None): ["layout.pp = 3", "layout.pp = 4", '"dualpipe-v"'],
    ("dualpipe", 4, 9, None): ["a multiple of 2 and at least 8", "= 9;", "gives 10"],
    ("dualpipe", 4, 6, None): ["= 6;", "gives 8"],
    ("zb-2", 4, 8, None): ['layout.schedule = "zb-2"', "zb-h1"],
    ("1f1b", 0, 8, None): ["layout.pp = 0"],
    ("1f1b", 4, 0, None): ["micro-batches per step = 0"],
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_refusals_name_field_value_and_remedy(case: tuple[str, int, int, int | None]) -> None:
    with pytest.raises(UserError) as refusal:
        require_schedule(*case)
    assert all(words in str(refusal.value) for words in REFUSALS[case]), refusal.value
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError):
        build_table(*case)
