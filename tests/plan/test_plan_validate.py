"""Predictions against published rows: the page in the guide is what the command gives, and within its bounds."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.plan import Validation, accuracy_page, validate
from meshwright.plan.coverage import coverage, made_residuals
from meshwright.plan.residuals import residuals, with_factors

ROOT = Path(__file__).parents[2]
NAMES = ("published_runs", "published_memory", "published_amd", "published_moe", "own_h200")
EVIDENCE = [ROOT / "benchmarks" / "evidence" / f"{name}.csv" for name in NAMES]
FIGURES = {
    "count", "predicted", "median_abs_time_error", "mean_abs_time_error", "time_bias", "median_abs_memory_error",
    "oom_precision", "oom_recall", "groups", "mean_regret", "max_regret", "top1_rate",
}  # fmt: skip
SWEEP = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Validation]:
    with pytest.MonkeyPatch.context() as patch:  # only the profile of the package
        patch.setenv("MESHWRIGHT_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield validate(EVIDENCE)


@pytest.fixture(scope="module")
def summary(found: Validation) -> dict[str, Any]:
    return found.summary()


def stated(path: Path) -> dict[str, int]:
    """How many rows of each source say their micro-batch and recomputation."""
    counts: dict[str, int] = {}
    for row in csv.DictReader(path.open(encoding="utf-8")):
        if row["micro_batch"] and row["recompute"]:
            source = row["id"].rpartition("-")[0]
            counts[source] = counts.get(source, 0) + 1
    return counts


def test_the_guide_shows_these_figures(summary: dict[str, Any]) -> None:
    """`python scripts/plan_evidence.py` writes it again, after the table that the intervals are from."""
    page = accuracy_page(summary, [path.name for path in EVIDENCE])
    assert (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8") == page


def test_the_table_of_the_package_is_of_these_formulas(found: Validation) -> None:
    """`python scripts/plan_evidence.py` writes it again after a change."""
    shipped = residuals()
    recorded = [row for row in shipped.rows if row.recorded]
    made = made_residuals(found.outcomes, recorded, shipped.names)
    assert [(row.id, row.traits) for row in made.rows] == [(row.id, row.traits) for row in shipped.rows]
    for kind in ("time", "memory"):
        errors = [getattr(row, kind) for row in made.of(kind)]
        assert errors == pytest.approx([getattr(row, kind) for row in shipped.of(kind)], abs=1e-4), kind
    assert made.factors == pytest.approx(shipped.factors, abs=2e-3)
    assert made.bands == pytest.approx(shipped.bands, abs=1e-3)
    assert {row.source for row in shipped.rows} == set(shipped.names), "every source has a name in sources.toml"


def test_intervals_hold_what_they_promise(found: Validation, summary: dict[str, Any]) -> None:
    """Every source's rows in the intervals that the others give: 80% of them, and far fewer if errors were halved."""
    time, memory = (summary["coverage"][kind]["all"] for kind in ("time", "memory"))
    assert time["rows"] > 300 and 0.75 <= time["share"] <= 0.85
    assert memory["rows"] > 100 and 0.65 <= memory["share"] <= 0.90  # fewer sources, two of which share a bias
    shipped = residuals()
    rows = [replace(row, time=row.time and row.time / 2, memory=row.memory and row.memory / 2) for row in shipped.rows]
    halved = coverage(found.outcomes, with_factors(rows, shipped.names, shipped.bands))
    assert halved["time"]["all"]["share"] < 0.65 and halved["memory"]["all"]["share"] < 0.65
    own = [summary["coverage"]["time"]["sources"][name] for name in ("planh200", "segmenth200", "peersh200")]
    assert all(one["half_width"] < 0.75 * time["half_width"] for one in own), "what is measured here is known better"


def test_layouts_that_are_told_apart_are_in_order(summary: dict[str, Any]) -> None:
    order = summary["coverage"]["order"]
    assert order["apart"]["pairs"] >= 50 and order["apart"]["right"] >= 0.8 * order["apart"]["pairs"]
    assert order["ties"]["pairs"] >= 30 and order["ties"]["right"] < 0.8 * order["ties"]["pairs"]


def test_errors_stay_within_bounds(summary: dict[str, Any]) -> None:
    dense, mixtures = summary["models"]["without experts"], summary["models"]["mixtures"]
    assert dense["median_abs_time_error"] <= 0.065 and dense["mean_abs_time_error"] <= 0.09
    assert mixtures["predicted"] >= 130 and mixtures["median_abs_time_error"] <= 0.13
    assert mixtures["mean_regret"] <= 0.05
    assert sum(figures["predicted"] for figures in summary["sources"].values()) == summary["overall"]["predicted"]
    assert sum(row["unit"] == "s" for row in summary["rows"]) >= 200
    for source, count in stated(EVIDENCE[0]).items():
        if count >= 10:
            assert summary["sources"][source]["median_abs_time_error"] <= 0.12, source
    for kind in ("peak_allocated", "steady_allocated_end_of_step"):
        assert summary["memory_kinds"][kind]["median_abs_memory_error"] <= 0.05, kind


def test_errors_have_no_direction(summary: dict[str, Any]) -> None:
    """By axes with enough rows to tell; the others are in the guide as they are."""
    for axis, least in (("tp", 20), ("cp", 10), ("zero", 20), ("GPUs", 20)):
        for value, figures in summary["axes"][axis].items():
            if figures["rows"] >= least:
                assert abs(figures["time_bias"]) <= 0.05, (axis, value)
    assert sum(figures["rows"] for figures in summary["axes"]["pp"].values()) == 328


def test_what_ran_is_seldom_called_impossible(summary: dict[str, Any]) -> None:
    stated = summary["refused"]["stated"]
    assert stated["rows"] > 200 and len(stated["refused"]) <= 0.02 * stated["rows"]


def test_the_worst_rows_are_named(summary: dict[str, Any]) -> None:
    errors = sorted((abs(row["predicted"] / row["measured"] - 1), row["id"]) for row in summary["rows"]
                    if row["unit"] == "s" and not row["use"])  # fmt: skip
    assert [row["id"] for row in summary["worst"]] == [name for _, name in reversed(errors[-20:])]
    assert all(row["limit"] and row["layout"] for row in summary["worst"])


def test_every_row_is_predicted_or_left_out_with_a_reason(summary: dict[str, Any]) -> None:
    ids = [row["id"] for path in EVIDENCE for row in csv.DictReader(path.open(encoding="utf-8"))]
    named = [row["id"] for row in summary["rows"]] + [row["id"] for row in summary["unpredicted"]]
    assert sorted(ids) == sorted(named)
    assert all(row["reason"] for row in summary["unpredicted"])
    experts = {row["id"] for row in summary["unpredicted"] if "experts" in row["reason"]}
    assert "mbridge-011" in experts


def test_a_sweep_has_groups_and_regret(tmp_path: Path) -> None:
    """Two layouts of one job and one of another: the slower prediction measured as the faster one is regretted."""
    path = tmp_path / "sweep.csv"
    path.write_text(
        f"{SWEEP}\n8,32,4,2048,16,24,1024,1,8,1,900\n8,32,4,2048,16,24,1024,8,1,1,450\n8,64,4,2048,16,24,1024,1,8,1,9\n"
    )
    result = CliRunner().invoke(app, ["plan", "--validate", str(path), "--json"])
    found = json.loads(result.stdout)
    parts = {
        "overall",
        "models",
        "sources",
        "memory_kinds",
        "guessed",
        "own",
        "coverage",
        "axes",
        "refused",
        "worst",
        "groups",
    }
    assert set(found) == parts | {"unpredicted", "rows"}
    assert set(found["overall"]) == FIGURES == set(found["sources"]["sweep"])
    assert [row["id"] for row in found["rows"]] == ["sweep:2", "sweep:3", "sweep:4"]
    assert found["overall"]["groups"] == 1
    chosen = next(row for row in found["rows"] if row["id"] == found["groups"][0]["chosen"])
    assert found["overall"]["mean_regret"] == pytest.approx(chosen["measured"] / 0.45 - 1)
    assert chosen["id"] == "sweep:2"  # data parallelism is predicted faster than tensor parallelism over eight


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    nothing = tmp_path / "other.csv"
    nothing.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="none of the known headers"):
        validate([nothing])
    for arguments, word in (
        ([], "exactly one"),
        (["--validate", str(tmp_path / "no.csv")], "is not a file"),
        (["--check", "demo", "--markdown", "x.md"], "--markdown"),
        (["--check", "demo"], "cluster.gpu"),
    ):
        error = CliRunner().invoke(app, ["plan", *arguments]).exception
        assert isinstance(error, UserError) and word in str(error), arguments


def test_check_explains_a_job() -> None:
    arguments = ["plan", "--check", "pretrain-1b", "--cluster", "1xh200"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["step_s"] == pytest.approx(sum(found["phases_s"].values()))
    assert found["fits"] and found["memory"][0]["device_bytes"] < found["capacity_bytes"]
    shown = CliRunner().invoke(app, arguments).stdout
    for word in ("forward products", "optimizer states", "tokens/s per GPU", "fits with"):
        assert word in shown
    tight = CliRunner().invoke(app, ["plan", "--check", "pretrain-1b", "--cluster", "1xa100-40gb"]).stdout
    assert "does not fit" in tight and "guessed" in tight and "guessed" not in shown
