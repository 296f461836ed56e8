"""Intervals: what they promise, what widens them, and that every answer has one."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_jobs import llama, nodes

import meshwright
from meshwright.job.devices import Cluster
from meshwright.plan import error_bars, predict
from meshwright.plan.interval import Evidence, weighted_quantile, widened
from meshwright.plan.residuals import evidence_of, read_residuals, residuals
from meshwright.plan.traits import Traits

RUN = Traits("h100", 64, False, False, frozenset({"zero"}), "fused", "16-bit")


def drawn(sources: int, rows: int, seed: int, bias: float = 0.0) -> tuple[list[Traits], list[float], list[str]]:
    """Runs that are all alike, with errors that a source's rows share in part."""
    random = np.random.default_rng(seed)
    shared = random.normal(bias, 0.06, sources)
    errors = [float(shared[source] + random.normal(0.0, 0.08)) for source in range(sources) for _ in range(rows)]
    return [RUN] * len(errors), errors, [f"s{source}" for source in range(sources) for _ in range(rows)]


def test_new_sources_fall_inside_in_8_of_10_cases() -> None:
    """Twelve times 15 sources that share a bias, and then 100 others."""
    shares = []
    for seed in range(12):
        runs, errors, sources = drawn(15, 8, seed, bias=0.05)
        evidence = Evidence(runs, errors, sources, "time")
        spread = evidence.spread(RUN, evidence.factor([True] * len(runs)))
        assert spread.low < 0 < spread.high and spread.low + spread.high > 0, "the bias moves the interval"
        _, fresh, _ = drawn(100, 5, 100 + seed, bias=0.05)
        shares.append(np.mean([spread.low <= error <= spread.high for error in fresh]))
    assert 0.75 <= np.mean(shares) <= 0.85


def test_one_large_source_does_not_dominate() -> None:
    runs, errors, sources = drawn(12, 10, seed=3)
    before = Evidence(runs, errors, sources, "time").spread(RUN, 1.0)
    runs, errors, sources = runs + [RUN] * 300, errors + [0.5] * 300, sources + ["large"] * 300
    after = Evidence(runs, errors, sources, "time").spread(RUN, 1.0)
    assert np.quantile(errors, 0.5) == 0.5 and after.low + after.high < 0.5
    assert 1.0 <= (after.high - after.low) / (before.high - before.low) < 4.0


def test_less_evidence_is_wider() -> None:
    assert widened(1e6) == pytest.approx(1.0, abs=1e-4) and widened(0.1) == widened(1.0)
    assert widened(1.0) > widened(2.0) > widened(5.0) > 1.0
    assert widened(9.0) == pytest.approx(1.383 / 1.2816 * (1 + 1 / 9) ** 0.5, rel=1e-3)  # Student's t of 9, 90%
    values = np.random.default_rng(4).normal(size=50)
    assert weighted_quantile(values, np.ones(50), 0.3) == pytest.approx(np.quantile(values, 0.3, method="hazen"))

    evidence, factor = evidence_of("time")

    def width(**changes: Any) -> float:
        spread = evidence.spread(replace(RUN, **changes), factor)
        return spread.high - spread.low

    assert width() < width(own=True) < width(own=True, gpu="rtx-3090", gpus=2)
    assert width() < width(gpus=65536) and width() < width(axes=frozenset({"cp", "tp"}))
    assert width(gpu="h200", gpus=1, calibrated=True, own=True, axes=frozenset()) < 0.12


def test_the_table_survives_its_file() -> None:
    table = residuals()
    assert read_residuals(table.text()) == table
    assert sum(row.time is not None for row in table.rows) > 400


def test_answers_say_what_they_rest_on() -> None:
    one = llama("llama-3.2-1b")
    near = error_bars(one, Cluster(gpu="h200"), predict(one, Cluster(gpu="h200")))
    assert "our own runs on an H200" in near.evidence and "little" not in near.evidence
    job = llama("llama-3.2-1b", layout={"dp_shard": 8, "zero": 3}, batch={"global_batch": 8, "micro_batch": 1})
    bars = {gpu: error_bars(job, nodes(1, gpu), predict(job, nodes(1, gpu))) for gpu in ("h100", "h200", "rtx-3090")}
    assert "none of Meshwright itself" in bars["h100"].evidence and "h100" in bars["h100"].evidence
    assert "little is like it (none on rtx-3090" in bars["rtx-3090"].evidence
    assert "none with zero, on more than 1 GPU" in bars["h100"].memory_evidence
    wide = {gpu: log(each.step_s[1] / each.step_s[0]) for gpu, each in bars.items()}
    assert wide["h100"] < wide["rtx-3090"]
    assert wide["h200"] < 1.5 * wide["h100"], "a profile does not make an answer less sure"
    prediction = predict(job, nodes(1))
    low, high = bars["h100"].tokens_per_s_per_gpu
    assert low < prediction.tokens_per_s_per_gpu < high
    assert low == pytest.approx(prediction.tokens_per_s_per_gpu * prediction.step_s / bars["h100"].step_s[1])
    assert bars["h100"].device_bytes[0] <= prediction.fullest.device <= bars["h100"].device_bytes[1]
    assert bars["h100"].times(10.0)[1] == pytest.approx(10.0 * bars["h100"].step_s[1] / prediction.step_s)


def inside(answer: dict[str, Any]) -> bool:
    """Whether an answer's figures lie in their intervals."""
    names = [name for name in ("step_s", "tokens_per_s_per_gpu", "device_bytes") if name in answer]
    between = answer["interval"]
    return len(names) > 1 and all(between[name][0] <= answer[name] <= between[name][1] for name in names)


@pytest.mark.thorough
def test_every_answer_has_an_interval(cli: Callable[..., Any]) -> None:
    model = ("plan", "--model", "llama-3.2-1b", "--seq", "2048", "--batch-tokens", "1048576")
    found = json.loads(cli(*model, "--cluster", "8xh100", "--json").out)
    assert all(map(inside, found["layouts"])) and found["evidence"]["time"] and found["evidence"]["memory"]
    first, *others = found["layouts"]
    bands = residuals().bands
    for one in others:
        same = all(one["layout"][axis] == first["layout"][axis] for axis in ("tp", "cp", "pp", "zero"))
        near = one["step_s"] / first["step_s"] <= exp(bands["same" if same else "other"])
        assert one["tie"] == near
    assert first["tie"] and [one["tie"] for one in found["layouts"] if one["simplest"]] == [True]
    shown = cli(*model, "--cluster", "8xh100", "--tokens", "1e11", "--top", "3").out
    for words in ("80% interval", "evidence for time: nearest", "evidence for memory", "are a tie (≈)", "days (80%"):
        assert words in shown

    several = json.loads(cli(*model, "--compare", "8xh100", "8xa100-80gb", "--json").out)
    assert all(map(inside, several["clusters"])) and all(one["evidence"]["time"] for one in several["clusters"])
    sized = (*model, "--cluster", "8xh100", "--tokens", "1e12", "--days", "4")
    assert inside(json.loads(cli(*sized, "--json").out)["answer"])
    assert "days, 80% interval" in cli(*sized).out


def test_one_job_has_an_interval(cli: Callable[..., Any]) -> None:
    words = ("plan", "--check", "pretrain-1b", "--cluster", "1xh200")
    found = json.loads(cli(*words, "--json").out)
    assert inside(found) and "our own runs" in found["evidence"]["time"]
    assert "80% interval: " in cli(*words).out
    tight = cli("plan", "--check", "pretrain-1b", "--cluster", "1xh100", "--set", "batch.micro_batch=8").out
    assert "fits with" in tight and "memory may not suffice" not in tight
    points = json.loads(cli(*words, "--scale", "1,2", "--json").out)["points"]
    assert all(inside(one) for one in points if one["gpus"])


def test_own_runs_are_validated_apart(cli: Callable[..., Any], tmp_path: Path) -> None:
    rows = tmp_path / "own.csv"
    header = "id,job,overrides,cluster,step_s,allocated_bytes,reserved_bytes,device_bytes"
    measured = "mine-1,pretrain-1b,batch.micro_batch=4 batch.global_batch=4,1xh200,0.25,30e9,,"
    rows.write_text(f"{header}\n{measured}\nmine-2,pretrain-1b,run.stepz=3,1xh200,0.25,30e9,,\n")
    found = json.loads(cli("plan", "--validate", str(rows), "--json").out)
    assert found["overall"]["predicted"] == 0 and found["own"]["predicted"] == 1
    assert found["coverage"]["time"]["sources"]["mine"]["rows"] == 1 and found["coverage"]["time"]["all"]["rows"] == 0
    assert found["rows"][0]["use"] == "own" and "stepz" in found["unpredicted"][0]["reason"]
    assert "own runs: 1 predicted" in (shown := cli("plan", "--validate", str(rows)).out)
    assert "time, own runs mine: " in shown and "published" not in shown


def test_a_plan_in_python_has_them() -> None:
    plan = meshwright.plan("llama-3.2-1b", "8xh100", top=2)
    row, bars = plan.rows[0], plan.best.bars
    assert row["tokens_per_s_per_gpu_low"] < row["tokens_per_s_per_gpu"] < row["tokens_per_s_per_gpu_high"]
    assert row["memory_gib_low"] <= row["memory_gib"] <= row["memory_gib_high"]
    assert bars.step_s[0] < plan.best.step_s < bars.step_s[1] and plan.evidence == bars.evidence
    assert "80% interval" in str(plan)
