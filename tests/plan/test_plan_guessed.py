"""GPUs whose rates are guessed: every site can be planned, and the answer says what is a guess and what it is worth."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import asked
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.hardware import gpu_by_key, known_gpus, known_sites
from meshwright.job.devices import Cluster
from meshwright.plan import accuracy_page, machine_of, parse_cluster, search, validate

ROWS = Path(__file__).parents[2] / "benchmarks" / "evidence" / "published_amd.csv"
AMD = ("mi250x", "mi300x", "mi325x")


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return validate([ROWS]).summary()


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False).stdout


@pytest.mark.parametrize("site", known_sites())
def test_every_site_can_be_planned(site: str) -> None:
    found = search(asked("llama-3.2-1b", 2048, 64), parse_cluster(site), top=1)
    best = found.best[0].prediction
    assert best.fits and best.mfu is not None and 0.2 < best.mfu < 0.7
    assert best.guessed or known_sites()[site].gpu == "h200", "which has a profile"


def test_every_gpu_of_the_table_has_rates() -> None:
    for gpu in known_gpus():
        rates = machine_of(Cluster(gpu=gpu.key), profiled=False).rates
        assert bool(rates.guess) == gpu.key.startswith("mi"), gpu.key


@pytest.mark.parametrize("gpu", AMD)
def test_the_answer_says_what_is_guessed(gpu: str) -> None:
    job = ["--set", "batch.micro_batch=2", "--cluster", f"1x{gpu}"]
    found = json.loads(invoke("--check", "pretrain-1b", *job, "--json"))
    kernels, driver = found["guessed"]
    assert f"kernels and links of {gpu}: guessed from" in kernels and "longer than predicted" in kernels
    assert f"driver and communicators of {gpu}" in driver and "guessed" in driver
    assert f"guessed: {kernels}" in invoke("--check", "pretrain-1b", *job)
    options = ["--model", "llama-3.2-1b", "--cluster", f"2x8x{gpu}", "--seq", "2048", "--top", "1"]
    searched = json.loads(invoke(*options, "--json"))
    assert kernels in searched["guessed"] and any("network between nodes" in guess for guess in searched["guessed"])
    assert f"guessed: {kernels}" in invoke(*options)


def test_a_scaling_curve_says_it_too() -> None:
    options = ["--check", "pretrain-1b", "--cluster", "lumi", "--scale", "1,8", "--set", "batch.micro_batch=1"]
    found = json.loads(invoke(*options, "--json"))
    assert any("mi250x: guessed from" in guess for guess in found["guessed"])
    assert f"guessed: {found['guessed'][0]}" in invoke(*options)


def test_an_unpublished_bandwidth_is_a_guess() -> None:
    guessed = machine_of(parse_cluster("marenostrum5")).guessed
    assert any("h100-64gb: not published, guessed to be 2 TB/s" in guess for guess in guessed)


def test_errors_of_held_out_runs_are_those_the_answer_states(summary: dict[str, Any]) -> None:
    """What a guess promises, how many runs and how much shorter or longer they took, is what --validate finds."""
    for gpu in AMD:
        held = [row for row in summary["rows"] if row["gpu"] == gpu and row["use"] == "held out"]
        took = sorted(row["measured"] / row["predicted"] - 1 for row in held)
        guess = machine_of(Cluster(gpu=gpu)).rates.guess
        counted = {5: "five", 6: "six"}[len(held)]
        least, most = (round(100 * abs(share)) for share in (took[0], took[-1]))
        words = rf"{counted} .*took from {least}% (less )?to {most}% longer than predicted"
        assert re.search(words, guess), (guess, took)
        assert (" less " in guess) == (took[0] < 0)


def test_fitted_runs_are_met_and_held_out_ones_within_bounds(summary: dict[str, Any]) -> None:
    errors = {row["id"]: row["predicted"] / row["measured"] - 1 for row in summary["rows"]}
    for row in csv.DictReader(ROWS.open(encoding="utf-8")):
        bound = 0.015 if row["use"] == "fitted" else 0.35
        assert abs(errors[row["id"]]) <= bound, row["id"]
    assert summary["guessed"]["fitted"]["predicted"] == 2
    assert summary["guessed"]["held out"]["median_abs_time_error"] <= 0.05


def test_they_count_apart(summary: dict[str, Any]) -> None:
    assert summary["overall"]["count"] == 0 and summary["sources"] == {} and summary["groups"] == []
    assert not summary["unpredicted"] and len(summary["rows"]) == 19
    page = accuracy_page(summary, [ROWS.name])
    assert "## GPUs whose rates are guessed" in page and "| lumitest-001 | 16 × mi250x |" in page
    shown = invoke("--validate", str(ROWS))
    assert "rates guessed, held out lumitest-002: 64 × mi250x, dp 32, zero 1, tp 2" in shown


def test_gh200_is_a_name() -> None:
    cluster = parse_cluster("4x4xgh200")
    assert cluster.gpu == "gh200-480gb" == gpu_by_key("GH200").key and machine_of(cluster).gpus == 16
    assert machine_of(Cluster(gpu="gh200")).memory_bytes == 96 * 2**30
    host = machine_of(parse_cluster("8xgh200")).host_bytes
    assert host == pytest.approx(480e9, rel=0.01)
    with pytest.raises(UserError, match="gh201"):
        parse_cluster("8xgh201")
