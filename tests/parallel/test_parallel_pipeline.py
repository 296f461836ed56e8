"""The pipeline in the real runtime: order, memory and idle time are those of the table and its simulation."""

import gc
import time
from typing import Any

import pytest
import torch
from gloo_threads import collect_settled

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout, table_of
from meshwright.layout import rules as layout
from meshwright.parallel import build, join_world
from meshwright.pipeline import Action, Kind, StageTimes, simulate
from meshwright.verify import check, run_ranks
from meshwright.verify.documents import unequal_corpus

UNIT_S = 0.25
TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
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


def watched_step(job: Job, unit_s: float) -> tuple[list[tuple[Action, float, float]], int, int]:
    """One rank's actions of a second step, each stretched to its time, the most activations it held, and how many
    hidden states were left at its end."""
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    text = unequal_corpus(job).train
    data = iter(Loader(Stream([RunningWindows(text, 8)], seed=0), global_batch=job.batch.global_batch))
    engine.accumulate(next(data), 1)  # connections are made in the first step
    weights.zero_gradients()
    spans: list[tuple[Action, float, float]] = []
    most = 0

    def listen(action: Action, started: float, ended: float, held: int) -> None:
        nonlocal most
        most = max(most, held)
        time.sleep(max(0.0, TIMES[action.kind] * unit_s - (ended - started)))
        spans.append((action, started, time.perf_counter()))

    engine.watch(listen)
    step = next(data)
    world.barrier()
    engine.accumulate(step, 2)
    collect_settled()
    hidden = (job.batch.micro_batch, job.batch.sequence_length, job.model.width)
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return spans, most, sum(one.shape == hidden and one.device.type == "cpu" for one in tensors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_does_what_its_table_says_and_holds_as_many_activations(schedule: str) -> None:
    job = pipeline_job(schedule)
    table = table_of(job)
    simulation = simulate(table, StageTimes(1.0, 2.0, 1.0, 1.0))
    for rank, (spans, most, left) in enumerate(run_ranks(watched_step, 4, job, 0.0)):
        assert tuple(action for action, _, _ in spans) == table.orders[rank]
        assert most == simulation.in_flight[rank]
        assert left == 0, "buffers of what was received"


@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_idle_time_is_the_simulated(schedule: str) -> None:
    """Sleeping stages, so that cores do not matter; a busy machine may still delay a whole try, hence three."""
    job = pipeline_job(schedule, ranks=3, micro_batches=3)
    times = StageTimes(*(TIMES[kind] * UNIT_S for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)))
    simulated = simulate(table_of(job), times)
    errors = []
    for _ in range(3):
        ranks = [spans for spans, _, _ in run_ranks(watched_step, 3, job, UNIT_S)]
        started = min(start for spans in ranks for _, start, _ in spans)
        makespan = max(end for spans in ranks for _, _, end in spans) - started
        idle = [makespan - sum(end - start for _, start, end in spans) for spans in ranks]
        errors.append(max(abs(real / ideal - 1.0) for real, ideal in zip(idle, simulated.idle_s, strict=True)))
        if errors[-1] < 0.1:
            return
    pytest.fail(f"idle time per rank is off by {errors}")


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-interleaved", "zb-v", "dualpipe-v"])
def test_zero_3_with_a_split_backward_is_refused(schedule: str) -> None:
    job = pipeline_job(schedule, ranks=2, micro_batches=8, dp_shard=2, zero=3)
    with pytest.raises(UserError, match=r'layout.zero = 3 .* layout.schedule = ".*" splits.*set layout.zero = 2'):
        require_layout(job, 4)


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
