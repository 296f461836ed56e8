"""The cluster's step, put together from ranks that were run alone."""

import re
from dataclasses import replace
from typing import Any

import pytest
from rehearsed_jobs import a_job, as_planned, cluster_of

from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan import machine_of, predict
from meshwright.rehearse import RehearsedRank, RehearsedStep, compose

LONG = {"preset": "llama-3.1-8b", "sequence": 32768, "batch": 16}
PIPE = {"pp": 4, "dp_shard": 4, "zero": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"layout": {"dp_replicate": 16, "zero": 0}},
    "zero 1": {"layout": {"dp_shard": 16, "zero": 1}},
    "zero 2": {"layout": {"dp_shard": 16, "zero": 2}},
    "zero 3": {"layout": {"dp_shard": 16, "zero": 3}},
    "zero 3 recomputed": {"layout": {"dp_shard": 16, "zero": 3}, "memory": {"recompute": "full"}},
    "hsdp": {"layout": {"dp_shard": 8, "dp_replicate": 2, "zero": 3}},
    "tp without sp": {"layout": {"tp": 4, "sp": False, "dp_shard": 4, "zero": 1}},
    "tp sp": {"layout": {"tp": 8, "dp_shard": 2, "zero": 3}, "memory": {"recompute": "selective"}},
    "cp ring": {**LONG, "layout": {"cp": 4, "dp_shard": 4, "zero": 3}},
    "cp allgather": {**LONG, "layout": {"cp": 4, "cp_method": "allgather", "dp_shard": 4, "zero": 3}},
    "cp ulysses": {**LONG, "layout": {"cp": 4, "cp_method": "ulysses", "dp_shard": 4, "zero": 3}},
    "1f1b": {"layout": PIPE},
    "1f1b zero 3": {"layout": {**PIPE, "zero": 3}},
    "gpipe": {"layout": {**PIPE, "schedule": "gpipe"}},
    "interleaved": {"layout": {**PIPE, "schedule": "interleaved", "virtual_stages": 2}},
    "zb-h1": {"layout": {**PIPE, "schedule": "zb-h1"}},
    "zb-v": {"layout": {**PIPE, "schedule": "zb-v"}},
    "dualpipe": {"layout": {**PIPE, "schedule": "dualpipe"}},
    "all": {
        "preset": "llama-3-70b",
        "batch": 128,
        "layout": {"tp": 4, "pp": 4, "dp_shard": 4, "zero": 1},
        "memory": {"recompute": "full"},
    },
    "ep": {"preset": "qwen3-30b-a3b", "layout": {"dp_shard": 16, "ep": 8, "zero": 3}},
    "ep pp": {"preset": "qwen3-30b-a3b", "layout": {"pp": 4, "dp_shard": 8, "ep": 8, "zero": 1}},
    "offload": {"layout": {"dp_shard": 16, "zero": 2}, "memory": {"offload": ["optimizer"]}},
}


def composed(job: Job, cluster: Cluster, ranks: list[RehearsedRank], device: str = "NVIDIA H200") -> RehearsedStep:
    step, warnings = compose(job, cluster, ranks, device)
    assert step is not None, warnings
    return step


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_compute_as_planned_make_the_planned_step(name: str) -> None:
    job = a_job(**LAYOUTS[name])
    cluster = cluster_of(job, "h200")
    step, planned = composed(job, cluster, as_planned(job, cluster)), predict(job, cluster)
    assert step.step_s == pytest.approx(planned.step_s, rel=1e-9) and step.planned_s == planned.step_s
    assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
    assert step.measured_s + step.modelled_s == pytest.approx(step.step_s)
    assert sum(step.phases_s[one] for one in step.modelled) == pytest.approx(step.modelled_s)
    for phase in set(step.modelled) & set(planned.phases) - {"tensor and context transfers"}:
        assert step.phases_s[phase] == pytest.approx(planned.phases[phase], rel=1e-6), phase
    assert step.tokens_per_s == pytest.approx(job.tokens_per_step / step.step_s)


def test_slower_compute_hides_more_of_the_wire() -> None:
    job = a_job(batch=16, layout={"dp_shard": 16, "zero": 3})
    slow = cluster_of(job, "h200").model_copy(update={"links": {"network": 20.0}})
    once, twice, much = (composed(job, slow, as_planned(job, slow, slower)) for slower in (1.0, 2.0, 50.0))
    wire = "parameter and gradient transfers"
    assert twice.measured_s == pytest.approx(2 * once.measured_s, rel=1e-9)
    assert once.step_s < twice.step_s < 2 * once.step_s
    assert once.phases_s[wire] > twice.phases_s[wire] > much.phases_s[wire] > 0.0
    assert much.phases_s[wire] < 0.3 * once.phases_s[wire], "what is left is what it slows compute down by"


def test_a_pipelines_bubble_grows_with_its_stages() -> None:
    job = a_job(layout=PIPE)
    cluster = cluster_of(job, "h200")
    ranks = as_planned(job, cluster)
    once, twice = composed(job, cluster, ranks), composed(job, cluster, as_planned(job, cluster, 2.0))
    bubble = "pipeline bubble and sends"
    assert twice.phases_s[bubble] == pytest.approx(2 * once.phases_s[bubble], rel=0.1)
    slow = replace(
        ranks[1],
        step_s=1.5 * ranks[1].step_s,
        phases_s={name: 1.5 * seconds for name, seconds in ranks[1].phases_s.items()},
        actions_s={name: 1.5 * seconds for name, seconds in ranks[1].actions_s.items()},
    )
    uneven = composed(job, cluster, [ranks[0], slow, *ranks[2:]])
    assert uneven.measured_s == pytest.approx(slow.step_s, rel=1e-6), "the slowest stage decides"
    assert uneven.step_s > 1.3 * once.step_s


def test_timers_slow_a_step_down_and_its_length_is_measured_without_them() -> None:
    job = a_job(layout={"dp_shard": 16, "zero": 3})
    cluster = cluster_of(job, "h200")
    [rank] = as_planned(job, cluster)
    timed = replace(rank, phases_s={name: 2 * seconds for name, seconds in rank.phases_s.items()})
    step, warnings = compose(job, cluster, [timed], "NVIDIA H200")
    assert step is not None and step.step_s == pytest.approx(composed(job, cluster, [rank]).step_s)
    assert any("2 times as long with timers" in one for one in warnings)


def test_a_stage_that_was_not_run_is_taken_from_one_that_computes_the_same() -> None:
    job = a_job(layout=PIPE)
    cluster = cluster_of(job, "h200")
    ranks = as_planned(job, cluster)
    every = composed(job, cluster, ranks)
    split = predict(job, cluster)
    assert composed(job, cluster, [ranks[0], ranks[1], ranks[3]]).step_s == pytest.approx(every.step_s), split.phases
    for some, missing in (([0, 3], "stage 1 of 4"), ([0, 1], "stage 3 of 4"), ([1, 2, 3], "stage 0 of 4")):
        step, (why, *_) = compose(job, cluster, [ranks[one] for one in some], "NVIDIA H200")
        assert step is None and missing in why and "--each-stage" in why
    odd = a_job(layout={**PIPE, "split": [9, 8, 7, 8]})
    step, (why, *_) = compose(odd, cluster, [as_planned(odd, cluster)[one] for one in (0, 1, 3)], "NVIDIA H200")
    assert step is None and "stage 2 of 4" in why, "it has fewer layers than stage 1"


def test_no_step_of_ranks_that_did_not_fit_or_ran_on_a_cpu() -> None:
    job = a_job(layout=PIPE)
    cluster = cluster_of(job, "h200")
    first, *others = as_planned(job, cluster)
    full = replace(first, state="out of memory", phases_s={}, step_s=0.0, actions_s={})
    step, (why, *_) = compose(job, cluster, [full, *others], "NVIDIA H200")
    assert step is None and why == "the cluster's step is not known: rank 0 ran out of memory"
    step, (why, *_) = compose(job, cluster, [first, *others], "CPU")
    assert step is None and "ranks were run on CPU" in why
    untimed = replace(first, actions_s={"F0": 1.0})
    step, (why, *_) = compose(job, cluster, [untimed, *others], "NVIDIA H200")
    assert step is None and "actions B0 of rank 0 were not timed" in why
    for nothing in ({"phases_s": {}}, {"step_s": 0.0}, {"actions_s": {"F0": 0.0, "B0": 0.0}}):
        step, (why, *_) = compose(job, cluster, [replace(first, **nothing), *others], "NVIDIA H200")
        assert step is None and "rank 0 took no time; rehearse it again" in why


@pytest.mark.parametrize("gpu", ["h100", "a100-80gb"])
def test_compute_as_planned_here_is_as_planned_on_another_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.plan.machine.find_profile", lambda *given: None)
    for layout in ({"dp_shard": 16, "zero": 3}, PIPE):
        job = a_job(layout=layout)
        here, there = cluster_of(job, "h200"), cluster_of(job, gpu)
        step = composed(job, there, as_planned(job, here))
        assert step.step_s == pytest.approx(predict(job, there).step_s, rel=0.02)


def test_compute_of_another_gpu_is_scaled_by_kind_of_kernel() -> None:
    job = a_job(layout={"dp_shard": 16, "zero": 3})
    here, there = cluster_of(job, "h200"), cluster_of(job, "h100")
    [rank] = as_planned(job, here)
    same, other = composed(job, here, [rank]), composed(job, there, [rank])
    # Of the two only one has a measured profile, so that both are taken as their datasheets say.
    machines = [machine_of(cluster, profiled=False) for cluster in (here, there)]
    assert machine_of(here).measured is not None and machine_of(there).measured is None
    planned = [predict(job, machine).phases["optimizer"] for machine in machines]
    assert other.phases_s["optimizer"] / same.phases_s["optimizer"] == pytest.approx(planned[1] / planned[0])
    [said] = [one for one in compose(job, there, [rank], "NVIDIA H200")[1] if "the cluster has h100" in one]
    times = {kind: float(number) for kind, number in re.findall(r"(\w+) × ([\d.]+)", said)}
    assert set(times) == {"products", "attention", "memory"} and times["memory"] > max(1.2, times["products"])
    kinds = {"products": 1.0, "attention": 0.0, "communication": 5.0, "copies": 1.0, "optimizer": 9.0, "other": 0.0}
    profiled = composed(job, there, [replace(rank, kernels={"kinds_s": kinds, "top": []})])
    ratio = profiled.phases_s["backward"] / same.phases_s["backward"]
    expected = (times["products"] + times["memory"]) / 2
    assert ratio == pytest.approx(expected, rel=0.01), "half of it is products, the other half copies"
