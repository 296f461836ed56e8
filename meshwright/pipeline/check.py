"""Whether a table can run: every action once, nothing before its dependencies, no deadlock."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from meshwright.pipeline.table import Action, Kind, Table

# What an action leaves behind: ("F" | "I" | "W", stage, micro-batch). A whole backward leaves "I" and "W".
Result = tuple[str, int, int]


def results(action: Action) -> tuple[Result, ...]:
    """What an action produces for others."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.BACKWARD:
        return (("I", stage, micro_batch), ("W", stage, micro_batch))
    return ((action.kind, stage, micro_batch),)


def needs(table: Table, action: Action) -> tuple[Result, ...]:
    """What an action depends on."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return () if stage in table.first_stages else (("F", stage - 1, micro_batch),)
    if action.kind is Kind.WEIGHT:
        return (("I", stage, micro_batch),)
    own = ("F", stage, micro_batch)
    return (own,) if stage in table.last_stages else (own, ("I", stage + 1, micro_batch))


def steps_of(table: Table, rank: int) -> list[tuple[Action, ...]]:
    """A rank's order with each overlapped pair as one step."""
    if not table.overlapped:
        return [(action,) for action in table.orders[rank]]
    steps: list[tuple[Action, ...]] = []
    for action in table.orders[rank]:
        if steps and (steps[-1][-1], action) in table.overlapped:
            steps[-1] += (action,)
        else:
            steps.append((action,))
    return steps


def in_dependency_order(table: Table) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Every rank's steps, each rank's in its own order and none before its dependencies; ValueError on a deadlock."""
    waiting = [steps_of(table, rank)[::-1] for rank in range(table.ranks)]
    wanted = [_needs_of_first(table, steps) for steps in waiting]
    available: set[Result] = set()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(waiting):
            while steps and available.issuperset(wanted[rank]):
                step = steps.pop()
                wanted[rank] = _needs_of_first(table, steps)
                for action in step:
                    available.update(results(action))
                moved = True
                yield rank, step
    stuck = [f"rank {rank} at {steps[-1][0]}" for rank, steps in enumerate(waiting) if steps]
    if stuck:
        raise ValueError(f"{table.schedule} table deadlocks: {', '.join(stuck)}")


def _needs_of_first(table: Table, steps: list[tuple[Action, ...]]) -> list[Result]:
    return [need for action in steps[-1] for need in needs(table, action)] if steps else []


def require_consistent(table: Table) -> None:
    """ValueError unless each stage runs each of its micro-batches once, on its own rank, and no rank deadlocks."""
    for rank, order in enumerate(table.orders):
        for action in order:
            if table.stage_ranks[action.stage] != rank:
                raise ValueError(f"{table.schedule} table has {action} on rank {rank}, which does not hold that stage")
    made = Counter(result for order in table.orders for action in order for result in results(action))
    wanted = {
        (letter, stage, micro_batch)
        for stage in range(table.stages)
        for micro_batch in table.micro_batches_of(stage)
        for letter in "FIW"
    }
    wrong = sorted((made.keys() ^ wanted) | {result for result, times in made.items() if times > 1})
    if wrong:
        letter, stage, micro_batch = wrong[0]
        raise ValueError(
            f"{table.schedule} table runs {letter}{micro_batch} of stage {stage} {made[wrong[0]]} times "
            f"instead of {int(wrong[0] in wanted)}"
        )
    neighbours = {pair for order in table.orders for pair in pairwise(order)}
    for forward, backward in table.overlapped - neighbours:
        raise ValueError(f"{table.schedule} table overlaps {forward} with {backward}, which are not neighbours")
    for _ in in_dependency_order(table):
        pass
