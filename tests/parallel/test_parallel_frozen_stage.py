"""A pipeline stage with nothing to train: what it passes on is the same, and it has no gradients to clip or send."""

from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.parallel import build, join_world
from meshwright.train import Silent, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

EXPERTS = {"count": 4, "top_k": 2, "ffn_width": 6, "shared_width": 6, "first_dense": 2}
DENSE = {"experts": EXPERTS, "adapter": {"rank": 2, "targets": ["ffn"]}}
"""The first two of four layers are trained."""
SHARED = {"experts": EXPERTS, "adapter": {"rank": 2, "targets": ["shared"]}}
"""The last two."""
VISION = {"kind": "siglip", "image_size": 8, "patch": 4, "width": 12, "layers": 1, "heads": 2, "images": 2}
PROJECTOR = {"vision": VISION | {"train": ["projector"]}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the last": (DENSE, {"pp": 2}),
    "the last, on a rank with the first": (DENSE, {"pp": 2, "schedule": "zb-v"}),
    "the first": (SHARED, {"pp": 2, "schedule": "zb-h1"}),
    "the first of each rank": (SHARED, {"pp": 2, "schedule": "interleaved"}),
    "the first and its copy": (SHARED, {"pp": 2, "schedule": "dualpipe"}),
    "all but the projector's": (PROJECTOR, {"pp": 2}),
    "the last, compressed": (DENSE, {"pp": 2, "dp_replicate": 2, "compress": "bf16"}),
}


class Rows(Silent):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def job(model: dict[str, Any], layout: dict[str, Any]) -> Job:
    shape = {"vocab_size": 53, "width": 16, "layers": 4, "heads": 2, "max_sequence_length": 16}
    return Job.model_validate(
        {
            "model": shape | model,
            "layout": layout,
            "batch": {"sequence_length": 16, "global_batch": 8, "micro_batch": 1},
            "optimizer": {"clip": 1e-3},
            "data": {"sources": ("builtin:synthetic",), "workers": 0},
            "evaluation": {"every_steps": 0},
            "run": {"steps": 3, "device": "cpu"},
        }
    )


def trained(job: Job) -> tuple[list[dict[str, Any]], int, set[str]]:
    """The metrics of this rank's run, how many parameters it trains, and what it would save of them."""
    world, rows = join_world(job, torch.device("cpu")), Rows()
    engine, weights = build(job, world, torch.float64)
    trainer = make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, world)
    trainer.run()
    saved = {part.name for part in trainer.capture().parts if part.name.startswith(("model/", "optimizer/"))}
    return [{name: row[name] for name in ("loss", "grad_norm")} for row in rows.rows], len(weights.masters), saved


@pytest.mark.parametrize("case", CASES)
def test_it_trains_what_the_others_have(case: str) -> None:
    model, layout = CASES[case]
    pipeline = job(model, layout)
    [(alone, count, saved)] = run_ranks(trained, 1, job(model, {}))
    results = run_ranks(trained, ranks_of(pipeline.layout), pipeline)
    tolerance = 1e-3 if "compress" in layout else 1e-9
    for rows, _, _ in results:
        for row, expected in zip(rows, alone, strict=True):
            assert row == pytest.approx(expected, rel=tolerance)
    if layout.get("schedule") is None:
        assert {trains for _, trains, _ in results} == {0, count}
    assert set().union(*(names for _, _, names in results)) == saved
