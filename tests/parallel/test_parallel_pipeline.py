"""The pipeline in the real runtime: order, memory and waiting are those of the table and its simulation."""

import ctypes
import gc
import multiprocessing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from gloo_threads import collect_settled
from waiting import wait_until

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout, table_of
from meshwright.layout import rules as layout
from meshwright.parallel import build, join_world
from meshwright.pipeline import Action, StageTimes, Table, simulate
from meshwright.pipeline.check import needs, results
from meshwright.verify import check, run_ranks
from meshwright.verify.documents import unequal_corpus

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-interleaved", "zb-v", "dualpipe-v", "dualpipe")


def pipeline_job(schedule: str, *, ranks: int = 4, micro_batches: int = 8, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 32, "width": 16, "layers": 9, "heads": 2, "ffn_width": 16},
            "batch": {"sequence_length": 8, "global_batch": micro_batches, "micro_batch": 1},
            "layout": {"pp": ranks, "schedule": schedule, **layout},
            "data": {"sources": ["builtin:synthetic"], "mask_documents": False},
        }
    )


def watched_step(job: Job) -> tuple[list[Action], int, int]:
    """One rank's actions of a second step, the most activations it held, and how many hidden states were left at its
    end."""
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    text = unequal_corpus(job).train
    data = iter(Loader(Stream([RunningWindows(text, 8)], seed=0), global_batch=job.batch.global_batch))
    engine.accumulate(next(data), 1)  # connections are made in the first step
    weights.zero_gradients()
    actions: list[Action] = []
    most = 0

    def listen(action: Action, started: float, ended: float, held: int) -> None:
        nonlocal most
        most = max(most, held)
        actions.append(action)

    engine.watch(listen)
    step = next(data)
    world.barrier()
    engine.accumulate(step, 2)
    collect_settled()
    hidden = (job.batch.micro_batch, job.batch.sequence_length, job.model.width)
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return actions, most, sum(one.shape == hidden and one.device.type == "cpu" for one in tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_does_what_its_table_says_and_holds_as_many_activations(schedule: str) -> None:
    job = pipeline_job(schedule)
    table = table_of(job)
    simulation = simulate(table, StageTimes(1.0, 2.0, 1.0, 1.0))
    for rank, (actions, most, left) in enumerate(run_ranks(watched_step, 4, job)):
        assert tuple(actions) == table.orders[rank]
        assert most == simulation.in_flight[rank]
        assert left == 0, "buffers of what was received"


def dependants(table: Table, first: Action) -> set[Action]:
    """What the table lets no rank do before an action: what needs its results, and what comes after that on a rank."""
    actions = [action for order in table.orders for action in order]
    maker = {result: action for action in actions for result in results(action)}
    before = {action: {maker[need] for need in needs(table, action)} for action in actions}
    for order in table.orders:
        for earlier, later in pairwise(order):
            before[later].add(earlier)
    waiting = {first}
    while more := {action for action in actions if action not in waiting and before[action] & waiting}:
        waiting |= more
    return waiting - {first}


def held_back_steps(job: Job, held: Sequence[Action], done: "ctypes.Array[ctypes.c_byte]") -> None:
    """One step for each action: the rank that does it goes on once the others have done all that does not need it."""
    world = join_world(job, torch.device("cpu"))
    engine, _ = build(job, world)
    table = table_of(job)
    everything = sorted((action for order in table.orders for action in order), key=str)
    data = iter(Loader(Stream([RunningWindows(unequal_corpus(job).train, 8)], seed=0), global_batch=3))
    for number, stopped in enumerate(held):
        offset = number * len(everything)
        free = [offset + everything.index(action) for action in set(everything) - dependants(table, stopped)]

        def listen(
            action: Action, started: float, ended: float, in_flight: int,
            stopped: Action = stopped, offset: int = offset, free: list[int] = free,
        ) -> None:  # fmt: skip
            done[offset + everything.index(action)] = 1
            if action == stopped:
                wait_until(lambda: all(done[place] for place in free), f"others wait for {stopped} without need")

        engine.watch(listen)
        engine.accumulate(next(data), number + 1)
        world.barrier()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_a_rank_waits_for_nothing_but_what_its_table_says(schedule: str) -> None:
    """So its idle time is the simulated one, whatever each action takes."""
    job = pipeline_job(schedule, ranks=3, micro_batches=3)
    actions = [action for order in table_of(job).orders for action in order]
    held = [action for action in actions if action.micro_batch == 1]
    done = multiprocessing.RawArray("b", len(held) * len(actions))
    run_ranks(held_back_steps, 3, job, held, done, timeout_s=180.0)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-interleaved", "zb-v", "dualpipe-v"])
def test_zero_3_with_a_split_backward_is_refused(schedule: str) -> None:
    job = pipeline_job(schedule, ranks=2, micro_batches=8, dp_shard=2, zero=3)
    with pytest.raises(UserError, match=r'layout.zero = 3 .* layout.schedule = ".*" splits.*set layout.zero = 2'):
        require_layout(job, 4)


@pytest.mark.thorough
def test_zero_3_with_a_split_backward_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the refusal: when this fails, torch has learned it and the refusal can go."""
    job = pipeline_job("zb-v", ranks=2, micro_batches=8, dp_shard=2, zero=3)
    small = job.model_dump()
    small["evaluation"]["every_steps"], small["run"]["steps"] = 0, 1
    monkeypatch.setattr(layout, "_require_split_backward", lambda *_: None)
    verdict = check(Job.model_validate(small))
    wrong = [row for row in verdict.rows if row.kind == "gradient" and row.ok is False]
    assert wrong and max(row.error for row in wrong) > 0.1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"schedule": "zb-h1", "compile": True}, r'run.compile = true hangs with layout.schedule = "zb-h1"'),
        (
            {"schedule": "1f1b", "layers": 3},
            r"layout.pp = 4 makes 4 stages, more than model.layers = 3; lower layout.pp",
        ),
        ({"schedule": "interleaved", "micro_batches": 6}, r"a multiple of 4, but .* = 6; set batch.global_batch"),
        ({"schedule": "dualpipe-v", "micro_batches": 4}, r"at least 8 \(2 × layout.pp\), but .* = 4"),
        ({"schedule": "zb-v", "virtual_stages": 3}, r"layout.virtual_stages = 3 does not work with"),
        ({"schedule": "1f1b", "split": [1, 2, 3]}, r"layout.split = \[1, 2, 3\] must give each of 4 stages"),
        ({"schedule": "1f1b", "split": [1, 2, 3, 4]}, r"layout.split .* 9 in all; set it to \["),
    ],
)
def test_what_no_pipeline_can_do_is_refused_before_it_starts(overrides: dict[str, Any], sentence: str) -> None:
    given = dict(overrides)
    job = pipeline_job(given.pop("schedule"), micro_batches=given.pop("micro_batches", 8)).model_dump()
    job["run"]["compile"] = given.pop("compile", False)
    job["model"]["layers"] = given.pop("layers", 9)
    job["layout"] |= given
    made = Job.model_validate(job)
    with pytest.raises(UserError, match=sentence):
        require_layout(made, ranks_of(made.layout))
