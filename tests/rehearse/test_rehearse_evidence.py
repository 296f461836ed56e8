"""A rehearsal next to the plan of its job: `plan --check JOB --rehearsal FOLDER`."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rehearsed_jobs import a_job, as_planned, cluster_of

from meshwright.job import Job, job_text, load_job
from meshwright.plan import error_bars, predict, spelled
from meshwright.rehearse import RankMemoryUse, Rehearsal, RehearsedRank, evidence, mismatches
from meshwright.rehearse.folder import save_rehearsal

GIB = 2**30
PIPE = {"pp": 4, "dp_shard": 2, "zero": 1}


def measured(job: Job, rank: RehearsedRank, more: float = 1.0) -> RehearsedRank:
    """A rank with the memory that is planned for it, or so many times as much."""
    planned = predict(job, cluster_of(job)).memory[rank.pipeline_rank]
    memory = RankMemoryUse(
        allocated_bytes=round(more * planned.allocated),
        reserved_bytes=round(more * planned.reserved),
        device_bytes=round(more * planned.device),
        by_kind={"weights": round(more * planned.terms["weights"])},
        planned_bytes=planned.allocated,
        planned_reserved_bytes=planned.reserved,
        planned_terms=planned.terms,
    )
    return replace(rank, memory=memory)


def rehearsal_of(job: Job, *ranks: RehearsedRank, device: str = "NVIDIA H100 80GB HBM3") -> Rehearsal:
    cluster = spelled(cluster_of(job))
    return Rehearsal(8, cluster, device, version("torch"), ranks, None, (), ("no numerics",))


def test_what_was_run_is_known_and_the_rest_is_as_uncertain_as_before() -> None:
    job = a_job(layout=PIPE, memory={"recompute": "full"})
    cluster = cluster_of(job)
    plan = predict(job, cluster)
    bars = error_bars(job, cluster, plan)
    ranks = [measured(job, rank, 1.01) for rank in as_planned(job, cluster)]

    every = evidence(job, cluster, plan, bars, rehearsal_of(job, *ranks))
    assert every.step is not None and every.same_gpu
    full = max(1.01 * one.reserved + one.outside for one in plan.memory)
    assert every.device_bytes == pytest.approx((full, full)) and every.fits
    low, high = every.step_s
    assert bars.step_s[0] < low < every.step.step_s < high < bars.step_s[1]
    assert high - every.step.step_s == pytest.approx(every.step.modelled_s * (bars.relative_time[1] - 1))

    one = evidence(job, cluster, plan, bars, rehearsal_of(job, ranks[-1]))
    assert one.step is None and one.step_s == bars.step_s
    assert plan.fullest.rank == 0 and one.device_bytes == pytest.approx(bars.device_bytes), "it was not run"

    other = evidence(job, cluster, plan, bars, rehearsal_of(job, *ranks, device="NVIDIA H200"))
    assert other.step is not None and not other.same_gpu
    ratio = other.step_s[1] / other.step.step_s
    assert ratio == pytest.approx(bars.relative_time[1]), "compute of another GPU is not known, only better guessed"


def test_a_rank_that_ran_out_of_memory_does_not_fit() -> None:
    job = a_job(layout=PIPE, memory={"recompute": "full"})
    cluster = cluster_of(job)
    plan = predict(job, cluster)
    *others, last = (measured(job, rank) for rank in as_planned(job, cluster))
    short = replace(last, state="out of memory", memory=None, needed_bytes=90 * GIB, phases_s={}, actions_s={})
    bars = error_bars(job, cluster, plan)
    assert plan.fits
    found = evidence(job, cluster, plan, bars, rehearsal_of(job, *others, short))
    assert found.fits is False and found.device_bytes[0] >= 90 * GIB
    assert found.step is None and "rank 6 ran out of memory" in found.warnings[0]


def write(folder: Path, job: Job, *ranks: RehearsedRank) -> Path:
    """The job's file, and a rehearsal of it."""
    file = folder / "job.toml"
    file.write_text(job_text(job, "a job"))
    loaded = load_job(str(file))
    return save_rehearsal(folder / "rehearsed", loaded, rehearsal_of(loaded.job, *ranks), ["meshwright"]).path


def test_plan_check_shows_both(cli: Callable[..., Any], tmp_path: Path) -> None:
    job = a_job(layout=PIPE, memory={"recompute": "full"})
    ranks = [measured(job, rank, 1.02) for rank in as_planned(job, cluster_of(job), 1.1)]
    write(tmp_path, job, *ranks)
    words = ("plan", "--check", "job.toml", "--cluster", "8xh100")
    plain, both = cli(*words), cli(*words, "--rehearsal", "rehearsed")
    assert plain.code == both.code == 0, both.err
    assert "rehears" not in plain.out
    assert "ms of a step" in both.out and "(-2.0%)" in both.out
    assert "rehearsal: rehearsed, pipeline ranks 0, 1, 2, 3 of 4 on NVIDIA H100 80GB HBM3" in both.out
    assert "of it measured, the rest modelled" in both.out and "compute is measured" in both.out

    plan, found = (json.loads(cli(*words, *more, "--json").out) for more in ((), ("--rehearsal", "rehearsed")))
    assert found == plan | {"rehearsal": found["rehearsal"]}, "nothing else changes"
    step = found["rehearsal"]["step"]
    assert step["step_s"] == pytest.approx(1.1 * plan["step_s"], rel=0.03) and step["planned_s"] == plan["step_s"]
    assert found["rehearsal"]["interval"]["step_s"][1] < 1.1 * plan["interval"]["step_s"][1]
    itself = cli("plan", "--check", "rehearsed", "--json")
    assert json.loads(itself.out)["rehearsal"]["step"] == step, "its own cluster, and what it measured"


def test_never_of_another_job(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job(layout=PIPE)
    write(tmp_path, job, *(measured(job, rank) for rank in as_planned(job, cluster_of(job))))
    words = ("--cluster", "8xh100", "--set", "batch.global_batch=32", "--set", "precision.gradients=bf16")
    refused = cli("plan", "--check", "job.toml", "--rehearsal", "rehearsed", *words)
    assert refused.code == 2 and len(refused.err.splitlines()) == 1
    assert "batch.global_batch is 32, and was 64, precision.gradients is bf16, and was fp32" in refused.err
    beside = cli("plan", "--check", "rehearsed", *words)
    assert beside.code == 0 and "the rehearsal in rehearsed is not used: batch.global_batch is 32" in beside.out
    elsewhere = rehearsal_of(job, replace(as_planned(job, cluster_of(job))[0], pipeline_rank=4))
    assert mismatches(job, job, elsewhere) == ["it has a rank at place 4 of a pipeline of 4"]
    monkeypatch.setattr(sys.modules["meshwright.rehearse.evidence"], "version", lambda name: "1.0.0+cpu")
    refused = cli("plan", "--check", "job.toml", "--cluster", "8xh100", "--rehearsal", "rehearsed")
    assert refused.code == 2 and "torch is 1.0.0, and was" in refused.err
    for wrong in (("--scale", "8,16"), ()):
        source = ("--check", "job.toml") if wrong else ("job.toml",)
        assert "--rehearsal = rehearsed is of one job" in cli("plan", *source, *wrong, "--rehearsal", "rehearsed").err
    assert "holds no rehearsal" in cli("plan", "--check", "job.toml", "--rehearsal", ".").err
