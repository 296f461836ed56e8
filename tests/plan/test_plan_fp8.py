"""Plans of fp8 jobs: copies of weights kept over micro-batches, finer scales, the head in fp8, and what is said to be a
guess."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost import parameter_count
from meshwright.job import Job, load_job
from meshwright.job.devices import Cluster
from meshwright.plan import predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def job_of(**precision: Any) -> Job:
    fields = [f"precision.{name}={str(value).lower()}" for name, value in ({"compute": "fp8"} | precision).items()]
    return load_job("pretrain-1b", fields).job


def with_batch(job: Job, micro_batch: int, global_batch: int) -> Job:
    sizes = {"micro_batch": micro_batch, "global_batch": global_batch}
    return job.model_copy(update={"batch": job.batch.model_copy(update=sizes)})


def test_copies_of_weights_cost_two_bytes_and_save_casts() -> None:
    once, several = (predict(with_batch(job_of(), 2, size), Cluster(gpu="h200")) for size in (2, 8))
    model = job_of().model
    in_blocks = parameter_count(model) - model.vocab_size * model.width  # all but the table, which is tied
    assert "weights in fp8" not in once.memory[0].terms
    assert several.memory[0].terms["weights in fp8"] == pytest.approx(2 * in_blocks, rel=0.001)
    # Four micro-batches of which one casts weights take less than four steps of one.
    assert several.phases["forward products"] < 3.99 * once.phases["forward products"]


@pytest.mark.parametrize(
    ("fields", "words"), [({"fp8_scales": "block"}, "fp8_scales"), ({"fp8_head": True}, "fp8_head")]
)
def test_what_was_not_measured_is_said(fields: dict[str, Any], words: str) -> None:
    plain, changed = (predict(job_of(**given), Cluster(gpu="h200")) for given in ({}, fields))
    [said] = [guess for guess in changed.guessed if guess not in plain.guessed]
    assert words in said and "not measured" in said
    if "fp8_head" in fields:
        assert changed.step_s < plain.step_s and changed.memory[0].terms != plain.memory[0].terms


@pytest.mark.parametrize("scales", ["row", "block"])
def test_finer_scales_are_as_much_slower_and_smaller_as_an_h200_measured(scales: str) -> None:
    results = json.loads((RESULTS / "2026-11-18-precision-fp8-h200.json").read_text())["results"]
    measured = {row["setting"]: (row["step_s_min_median_max"][1], row["peak_gib"]) for row in results}
    tensor, fine = (predict(job_of(fp8_scales=given), Cluster(gpu="h200")) for given in ("tensor", scales))
    (step_s, gib), (fine_step_s, fine_gib) = measured["speed fp8"], measured[f"speed fp8, {scales}"]
    assert fine.step_s / tensor.step_s == pytest.approx(fine_step_s / step_s, rel=0.01)
    less = tensor.memory[0].allocated - fine.memory[0].allocated
    assert less / 2**30 == pytest.approx(gib - fine_gib, abs=0.2)


def test_recomputed_products_have_finer_scales_too() -> None:
    full = ["memory.recompute=full", "precision.compute=fp8"]
    tensor, block = (
        predict(load_job("pretrain-1b", [*full, f"precision.fp8_scales={scales}"]).job, Cluster(gpu="h200")).phases
        for scales in ("tensor", "block")
    )
    longer = block["forward products"] - tensor["forward products"]
    assert 0.5 * longer < block["recomputation"] - tensor["recomputation"] < longer  # all but the last product


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_gathered_in_fp8_are_half_the_bytes(zero: int) -> None:
    layout = ["layout.dp_shard=16", f"layout.zero={zero}", "batch.global_batch=64", "batch.micro_batch=4"]
    fields = [*layout, "precision.compute=fp8"]
    cluster = Cluster(gpu="h200", nodes=2, gpus_per_node=8)
    wide, narrow = (
        predict(load_job("pretrain-1b", [*fields, f"precision.fp8_gather={given}"]).job, cluster)
        for given in ("false", "true")
    )
    assert narrow.step_s < wide.step_s and narrow.memory[0].terms == wide.memory[0].terms
    [said] = [guess for guess in narrow.guessed if guess not in wide.guessed]
    assert "fp8_gather" in said
