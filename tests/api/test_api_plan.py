"""Plans as objects: rows to look at, jobs to go on with, the job's own optimizer and batch counted."""

import pytest

import meshwright
from meshwright.errors import UserError
from meshwright.plan import predict


def test_the_best_layout_is_a_job_to_go_on_with() -> None:
    job = meshwright.load_job(
        "llama-3.2-1b", set={"batch.global_batch": 64, "batch.sequence_length": 2048, "run.steps": 7}
    )
    plan = meshwright.plan(job, "8xh100", top=5)
    best = plan.best
    assert len(plan) == 5 and [one.step_s for one in plan] == sorted(one.step_s for one in plan)
    assert (best.job.batch.global_batch, best.job.batch.sequence_length, best.job.run.steps) == (64, 2048, 7)
    assert best.job.cluster.gpus_per_node == 8 and best.job.model == job.model
    assert best.step_s == predict(best.job, plan.cluster).step_s
    row = plan.rows[0]
    assert row["layout"] == best.words and 0 < row["mfu"] < 1 and 0 < row["memory_gib"] < 80 and row["fits"]
    assert best.words in str(plan)


def test_an_optimizer_that_keeps_less_needs_less() -> None:
    held = {}
    for name in ("adamw", "sgd"):
        job = meshwright.load_job("llama-3.2-1b", set={"optimizer.name": name, "optimizer.momentum": 0.0})
        one = meshwright.plan(job, "1xh100", top=1).best
        held[name] = one.prediction.fullest.terms["optimizer states"]
    assert held["sgd"] == 0 < held["adamw"]


def test_the_machines_may_be_the_job_s_own() -> None:
    job = meshwright.load_job("gpt2", set={"cluster.gpu": "h100", "cluster.gpus_per_node": 4})
    assert meshwright.plan(job, top=1).cluster.gpus_per_node == 4
    with pytest.raises(UserError, match="a search needs it"):
        meshwright.plan("gpt2")


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"no layout of the model fits on --cluster = 1xh100.*; give "):
        meshwright.plan("llama-3-70b", "1xh100")
