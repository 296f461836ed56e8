"""Plans with a calibration profile: what was measured is used, what was not is told."""

from pathlib import Path
from typing import Any

import pytest
from plan_jobs import llama

from meshwright.errors import UserError
from meshwright.hardware import Profile, write_profile
from meshwright.job.devices import Cluster
from meshwright.plan import compare_with_plan, machine_of, parse_cluster, predict

BATCH = {"sequence_length": 2048, "global_batch": 2, "micro_batch": 2}


def profile(gpu: str, flops: float, **fields: Any) -> Profile:
    """Every product at the same rate, so that what follows is known by hand."""
    products = [
        {"dtype": "bf16", "kind": kind, "rows": r, "columns": c, "inner": i, "seconds": 2.0 * r * c * i / flops}
        for kind in ("forward", "input", "weight", "weight sum")
        for r in (1024, 4096, 16384, 131072)
        for c in (1024, 4096, 16384, 131072)
        for i in (1024, 4096, 16384, 131072)
    ]
    given = {
        "gpu": gpu, "device": gpu, "date": "2026-01-01", "torch": "2.11", "memory_gib": 100.0, "units": 100,
        "took_s": 1.0, "products": products, "copies": [{"moved_bytes": 1e9, "seconds": 1e-3}],
    }  # fmt: skip
    return Profile.model_validate(given | fields)


def test_products_take_what_was_measured(profiles: Path) -> None:
    job = llama(batch=BATCH)
    write_profile(profile("a100-80gb", 100e12), profiles / "a100-80gb.json")
    cluster = Cluster(gpu="a100-80gb")
    prediction = predict(job, cluster)
    model, tokens = job.model, 4096
    layer = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim + 3 * model.width * model.ffn_width
    flops = 2.0 * tokens * (model.layers * layer + model.vocab_size * model.width)
    assert prediction.phases["forward products"] == pytest.approx(flops / 100e12, rel=0.12)
    assert not any("efficiency" in guess for guess in prediction.guessed)
    assert prediction.capacity_bytes == 100 * 2**30
    slower = profile("a100-80gb", 50e12)
    write_profile(slower, profiles / "a100-80gb.json")
    assert predict(job, cluster).phases["forward products"] == pytest.approx(
        2 * prediction.phases["forward products"], rel=0.01
    )


def test_what_was_not_measured_is_told(profiles: Path) -> None:
    assert any("no profile" in guess for guess in predict(llama(batch=BATCH), Cluster(gpu="a100-80gb")).guessed)
    write_profile(profile("a100-80gb", 100e12), profiles / "a100-80gb.json")
    wide = llama(batch=BATCH, precision={"compute": "fp16"})
    assert any("fp16: not in the profile" in guess for guess in predict(wide, Cluster(gpu="a100-80gb")).guessed)
    short = llama(batch={"sequence_length": 64, "global_batch": 1, "micro_batch": 1})
    assert any(
        "far from what the profile measured" in guess for guess in predict(short, Cluster(gpu="a100-80gb")).guessed
    )


def test_links_come_from_measured_collectives(profiles: Path) -> None:
    """A ring of 8 with 2 µs a hop and 100 GB/s gives both back."""
    rows = [
        {"kind": "all-reduce", "ranks": 8, "nodes": 1, "size_bytes": size, "seconds": 14 * (2e-6 + size / 8 / 100e9)}
        for size in (2**12, 2**20, 2**28)
    ]
    write_profile(profile("h100", 500e12, collectives=rows), profiles / "h100.json")
    wires = machine_of(parse_cluster("8xh100")).wires
    assert wires.node_bytes_per_s == pytest.approx(100e9, rel=1e-3)
    assert wires.node_latency_s == pytest.approx(2e-6, rel=1e-3)
    given = parse_cluster("8xh100").model_copy(update={"links": {"node": 200.0}})
    assert machine_of(given).wires.node_bytes_per_s == 200e9


def test_a_device_that_only_a_profile_knows(profiles: Path) -> None:
    with pytest.raises(UserError, match=r"'homemade' is not in the hardware table .* run meshwright calibrate"):
        parse_cluster("2xhomemade")
    write_profile(profile("homemade", 10e12), profiles / "homemade.json")
    prediction = predict(llama(batch=BATCH), parse_cluster("1xhomemade"))
    assert prediction.mfu is None and prediction.step_s > 0


def test_a_broken_profile_is_named(profiles: Path) -> None:
    (profiles / "h100.json").write_text('{"gpu": "h100"}')
    with pytest.raises(UserError, match=r"h100\.json cannot be read by this version"):
        machine_of(parse_cluster("1xh100"))


def test_a_run_beside_its_prediction() -> None:
    job = llama("llama-3.2-1b", batch=BATCH)
    expected = predict(job, Cluster(gpu="h200"))
    parts = {"forward": 0.01, "loss": 0.01, "backward": 0.01, "optimizer": 0.01, "other": 1.0}
    terms = {
        term.name: term for term in compare_with_plan(job, "NVIDIA H200", 1, 2 * expected.step_s, 30 * 2**30, parts)
    }
    assert set(terms) == {"step", "throughput", "peak memory", "forward", "loss", "backward", "optimizer"}
    assert terms["step"].error == pytest.approx(-0.5)
    named = sum(terms[name].predicted for name in ("forward", "loss", "backward", "optimizer"))
    assert named == pytest.approx(expected.step_s, rel=0.01)
    assert compare_with_plan(job, "a device nobody knows", 1, 1.0, None) == []
