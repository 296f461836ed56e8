"""The loss of extra tokens in a run's metrics: the same in every layout, and no part of the main loss."""

from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.parallel import build, join_world
from meshwright.train import Silent, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}}
TABLES = {"an extra token, tied": (1, True), "two extra tokens": (2, False), "two extra tokens, tied": (2, True)}
"""Tables that the last stage uses before and after an extra block."""


def job(layout: dict[str, Any], extra_tokens: int = 1, *, tied: bool = False) -> Job:
    shape = {"vocab_size": 53, "width": 16, "layers": 2, "heads": 2, "max_sequence_length": 16, "tied": tied}
    return Job.model_validate(
        {
            "model": shape | {"extra_tokens": extra_tokens, "extra_tokens_weight": 0.5},
            "layout": layout,
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2},
            "data": {"sources": ("builtin:synthetic",), "workers": 0},
            "evaluation": {"every_steps": 0},
            "run": {"steps": 2, "device": "cpu"},
        }
    )


class Rows(Silent):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def rows_of(job: Job) -> list[dict[str, Any]]:
    world, rows = join_world(job, torch.device("cpu")), Rows()
    engine, weights = build(job, world, torch.float64)
    make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, world).run()
    return [{key: row.get(key) for key in ("loss", "extra_loss")} for row in rows.rows]


def test_it_has_its_own_column() -> None:
    [alone] = run_ranks(rows_of, 1, job({}))
    [plain] = run_ranks(rows_of, 1, job({}, extra_tokens=0))
    assert plain[0]["extra_loss"] is None and plain[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-12)
    assert plain[1]["loss"] != pytest.approx(alone[1]["loss"], rel=1e-6)  # both have learned, from other gradients
    # Of 16 places 15 have a token after the next; an untrained model knows neither.
    assert alone[0]["extra_loss"] == pytest.approx(15 / 16 * alone[0]["loss"], rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_the_same(layout: str) -> None:
    [alone] = run_ranks(rows_of, 1, job({}))
    for rows in run_ranks(rows_of, 2, job(LAYOUTS[layout])):
        assert len(rows) == 2
        for row, expected in zip(rows, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("table", TABLES)
def test_a_split_backward_computes_the_same(table: str) -> None:
    extra_tokens, tied = TABLES[table]
    [alone] = run_ranks(rows_of, 1, job({}, extra_tokens, tied=tied))
    for rows in run_ranks(rows_of, 2, job({"pp": 2, "schedule": "zb-h1"}, extra_tokens, tied=tied)):
        for row, expected in zip(rows, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-9)
