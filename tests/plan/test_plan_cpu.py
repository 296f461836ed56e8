"""Plans for a CPU: every figure is from its profile, ranks share its cores, and it is never called a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.hardware import Profile, profile_of, write_profile
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.model import count_parameters
from meshwright.plan import compare_with_plan, machine_of, parse_cluster, predict

MODEL = {"vocab_size": 512, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_width": 192}
NAMES = (
    "rmsnorm", "layernorm", "rotary", "swiglu", "gelu", "bias", "dropout", "sum", "scale", "fill", "embedding",
)  # fmt: skip
ENTRY_S, FLOPS = 1e-9, 20e9


def profile(**fields: Any) -> Profile:
    """Every product at one rate, every operation at one rate per entry; calls and the loss take nothing."""
    products = [
        {"dtype": "fp32", "kind": kind, "rows": r, "columns": c, "inner": i, "seconds": 2.0 * r * c * i / FLOPS}
        for kind in ("forward", "input", "weight", "weight sum")
        for r in (64, 1024)
        for c in (64, 1024)
        for i in (64, 1024)
    ]
    operations = [
        {
            "name": name, "dtype": "fp32", "rows": r, "width": w,
            "forward_s": ENTRY_S * r * w, "backward_s": 2 * ENTRY_S * r * w,
        }
        for name in NAMES
        for r in (64, 4096)
        for w in (16, 1024)
    ]  # fmt: skip
    updates = [
        {"parameters": count, "tensors": 16, "clipped": True, "seconds": 16 * 1e-6 + 5e-9 * (count - 256)}
        for count in (256, 2**20, 2**24)
    ]
    given = {
        "gpu": "cpu", "device": "CPU of a test, 2 threads", "date": "2026-01-01", "torch": "2.11", "memory_gib": 16.0,
        "units": 2, "took_s": 1.0, "process_bytes": 3e8, "products": products, "operations": operations,
        "losses": [{"rows": 512, "vocabulary": 512, "compiled": False, "seconds": 1e-9}],
        "updates": updates, "copies": [{"moved_bytes": 1e8, "seconds": 1e-2}], "kernel_s": 1e-6, "launch_s": 1e-6,
    }  # fmt: skip
    return Profile.model_validate(given | fields)


def job(**sections: Any) -> Job:
    given = {"model": MODEL, "batch": {"sequence_length": 128, "global_batch": 4, "micro_batch": 4}}
    return Job.model_validate(given | sections)


def slowed(fields: dict[str, Any], name: str, times: float) -> Profile:
    rows = [
        row | {key: times * row[key] for key in ("seconds", "forward_s", "backward_s") if key in row}
        for row in fields[name]
    ]
    return Profile.model_validate(fields | {name: rows})


def phases(found: Profile, folder: Path, **sections: Any) -> dict[str, float]:
    write_profile(found, folder / found.file_name)
    return predict(job(**sections), Cluster(gpu="cpu")).phases


@pytest.mark.parametrize(
    ("measured", "phase"),
    [
        ("products", "forward products"),
        ("products", "backward products"),
        ("operations", "forward elementwise"),
        ("operations", "backward elementwise"),
        ("updates", "optimizer"),
    ],
)
def test_every_figure_is_the_profiles(measured: str, phase: str, profiles: Path) -> None:
    before = profile()
    own = phases(before, profiles)
    twice = phases(slowed(before.model_dump(exclude_none=True), measured, 2.0), profiles)
    assert twice[phase] == pytest.approx(2 * own[phase], rel=0.05)
    others = {"forward products", "forward elementwise", "optimizer"} - {phase, phase.replace("backward", "forward")}
    for name in others:
        assert twice[name] == pytest.approx(own[name], rel=0.05)


def test_operations_of_a_block_are_counted(profiles: Path) -> None:
    """A layer more is: two norms, two rotations, one gate, two residuals, and five sums of gradients."""
    deeper = MODEL | {"layers": 4}
    fewer, more = phases(profile(), profiles), phases(profile(), profiles, model=deeper)
    tokens, stream, inner, turned = 512, 64, 192, 64 + 32
    forward = tokens * (2 * stream + turned + inner + 2 * stream) * ENTRY_S
    backward = tokens * (2 * (2 * stream + turned + inner) + 5 * stream) * ENTRY_S
    assert more["forward elementwise"] - fewer["forward elementwise"] == pytest.approx(forward, rel=0.02)
    assert more["backward elementwise"] - fewer["backward elementwise"] == pytest.approx(backward, rel=0.02)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_calls_are_what_a_small_decoder_takes_beyond_its_operations(compute: str, profiles: Path) -> None:
    """Which it computes in fp32, as slow as another format may be."""
    model = {"vocab_size": 256, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "max_sequence_length": 16}
    decoders = [
        {
            "model": model | {"layers": layers}, "sequence_length": 16, "recompute": "none",
            "forward_s": 1e-3 + 0.5 * layers, "backward_s": 1e-3 + 1.0 * layers,
        }
        for layers in (2, 6)
    ]  # fmt: skip
    products = [row.model_dump() for row in profile().products]
    fields = {"products": [*products, *(_in_bf16(row, 1e5) for row in products)]}
    precision = {"compute": compute}
    without = phases(profile(**fields), profiles, precision=precision)
    found = phases(profile(**fields, decoders=decoders), profiles, precision=precision)
    assert found["forward elementwise"] - without["forward elementwise"] == pytest.approx(3 * 0.5, rel=0.01)
    assert found["backward elementwise"] - without["backward elementwise"] == pytest.approx(3 * 1.0, rel=0.01)


def test_ranks_share_the_cores_unless_they_were_measured_together(profiles: Path) -> None:
    two = job(layout={"dp_replicate": 2}, batch={"sequence_length": 128, "global_batch": 8, "micro_batch": 4})
    write_profile(profile(), profiles / "cpu.json")
    alone = predict(job(), parse_cluster("1xcpu"))
    shared = predict(two, parse_cluster("2xcpu"))
    assert shared.phases["forward products"] == pytest.approx(2 * alone.phases["forward products"], rel=0.02)
    assert any("meshwright calibrate --nproc 2" in guess for guess in shared.guessed)
    assert shared.capacity_bytes == alone.capacity_bytes / 2 == 8 * 2**30
    together = profile(ranks=2, collectives=_all_reduces())
    write_profile(together, profiles / together.file_name)
    assert together.file_name == "cpu-2-ranks.json" and profile_of("cpu") == profile()
    measured = predict(two, parse_cluster("2xcpu"))
    assert measured.phases["forward products"] == pytest.approx(alone.phases["forward products"], rel=0.02)
    said = [guess for guess in measured.guessed if "CPU" in guess or "links" in guess]
    assert said == ["ranks that share a CPU: runs of two took 1.0 to 1.1 times what was predicted"]
    assert any("hooks and copies of data parallelism: not in the profile" in guess for guess in measured.guessed)
    # Nothing hides behind a computation that needs the same cores: 4 bytes of every parameter, once around and back.
    wires = machine_of(parse_cluster("2xcpu")).wires
    assert wires.node_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    model = two.model
    layer = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim + 3 * model.width * model.ffn_width
    assert measured.phases["gradient reduction"] > 4 * model.layers * layer / 1e9


def _all_reduces() -> list[dict[str, Any]]:
    return [
        {"kind": "all-reduce", "ranks": 2, "nodes": 1, "size_bytes": size, "seconds": 2 * (1e-5 + size / 2 / 1e9)}
        for size in (2**12, 2**20, 2**24)
    ]


BLOCK_S, ENDS_S, PARAMETER_S = 1e-2, 3e-2, 1e-8
"""What sharing weights takes in the forward; in the backward twice as long."""


def _shared_decoders(zero: int) -> list[dict[str, Any]]:
    """Narrow and wide decoders, alone and shared by ranks."""
    rows = []
    for width in (32, 256):
        model = {"vocab_size": 256, "width": width, "heads": 2, "ffn_width": 2 * width, "max_sequence_length": 16}
        each = BLOCK_S + PARAMETER_S * (4 * width**2 + 3 * 2 * width**2 + 2 * width)
        ends = ENDS_S + PARAMETER_S * (2 * 256 * width + width)
        for layers in (2, 6):
            row = {"model": model | {"layers": layers}, "sequence_length": 16, "recompute": "none"}
            rows.append(row | {"forward_s": 1e-6 * layers, "backward_s": 1e-6 * layers})
            more = each * layers + ends
            shared = {"forward_s": 1e-6 * layers + more, "backward_s": 1e-6 * layers + 2 * more}
            rows.append(row | shared | {"zero": zero})
    return rows


@pytest.mark.parametrize(("zero", "forwards", "backwards"), [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 2, 2)])
def test_ranks_share_weights_as_decoders_did(zero: int, forwards: int, backwards: int, profiles: Path) -> None:
    """Two micro-batches: zero 2 reduces with each of them, zero 3 gathers too, the others do both once a step."""
    found = profile(ranks=2, collectives=_all_reduces(), decoders=_shared_decoders(zero))
    write_profile(found, profiles / found.file_name)
    layout = {"zero": zero, "dp_shard": 2} if zero else {"dp_replicate": 2}
    two = job(layout=layout, batch={"sequence_length": 128, "global_batch": 16, "micro_batch": 4})
    prediction = predict(two, parse_cluster("2xcpu"))
    forward = two.model.layers * BLOCK_S + ENDS_S + PARAMETER_S * count_parameters(two.model)
    expected = (forwards + 2 * backwards) * forward
    assert prediction.phases["parameter and gradient transfers"] == pytest.approx(expected, rel=0.01)
    assert prediction.phases["gradient reduction"] == prediction.phases["parameter gathering"] == 0.0
    assert not any("data parallelism" in guess for guess in prediction.guessed)


def test_what_is_not_measured_is_listed(profiles: Path) -> None:
    write_profile(profile(), profiles / "cpu.json")
    narrow = predict(job(precision={"compute": "bf16"}), Cluster(gpu="cpu"))
    assert any("bf16: not in the profile" in guess for guess in narrow.guessed)
    assert any("bf16 on a CPU" in guess for guess in narrow.guessed)
    muon = predict(job(optimizer={"name": "muon"}), Cluster(gpu="cpu"))
    assert any("muon" in guess for guess in muon.guessed)
    old = profile(operations=[], decoders=[])
    write_profile(old, profiles / "cpu.json")
    assert any("calibrate it again" in guess for guess in predict(job(), Cluster(gpu="cpu")).guessed)


def test_a_narrow_format_is_as_it_was_measured(profiles: Path) -> None:
    """Not as fp32, whose figures are used, and told to be, where the format's own are missing."""
    wide = profile().model_dump(exclude_none=True)
    attentions = [
        {
            "kernel": "cpu", "dtype": "fp32", "batch": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "sequence": 128,
            "forward_s": 1e-3, "backward_s": 3e-3,
        }
    ]  # fmt: skip
    wide |= {"attentions": attentions}
    slower = {
        name: [*wide[name], *(_in_bf16(row, 3.0) for row in wide[name])]
        for name in ("products", "attentions", "operations", "losses")
    }
    as_fp32 = phases(Profile.model_validate(wide), profiles, precision={"compute": "fp32"})
    own = phases(Profile.model_validate(wide | slower), profiles, precision={"compute": "bf16"})
    for name in ("forward attention", "backward attention", "forward elementwise"):
        assert own[name] == pytest.approx(3 * as_fp32[name], rel=0.05), name
    guessed = predict(job(precision={"compute": "bf16"}), Cluster(gpu="cpu")).guessed
    assert not any("in bf16" in guess or "links" in guess for guess in guessed)
    assert any("bf16 on a CPU" in guess for guess in guessed)
    write_profile(Profile.model_validate(wide | {"products": slower["products"]}), profiles / "cpu.json")
    guessed = predict(job(precision={"compute": "bf16"}), Cluster(gpu="cpu")).guessed
    assert any("operations, attention, the loss in bf16: not in the profile" in guess for guess in guessed)


def _in_bf16(row: dict[str, Any], times: float) -> dict[str, Any]:
    seconds = {key: times * row[key] for key in ("seconds", "forward_s", "backward_s") if key in row}
    return row | {"dtype": "bf16"} | seconds


def test_memory_is_tensors_and_the_program(profiles: Path) -> None:
    write_profile(profile(), profiles / "cpu.json")
    [rank] = predict(job(), Cluster(gpu="cpu")).memory
    assert rank.outside == 3e8 and rank.device == pytest.approx(rank.reserved + 3e8)
    terms = {term.name: term for term in compare_with_plan(job(), "CPU", 1, 1.0, 1e9)}
    assert terms["peak memory"].predicted == rank.device and terms["step"].measured == 1.0


def test_a_cpu_is_called_a_cpu(profiles: Path) -> None:
    with pytest.raises(UserError, match="cpu has no calibration profile"):
        parse_cluster("1xcpu")
    write_profile(profile(), profiles / "cpu.json")
    shown = CliRunner().invoke(app, ["plan", "--check", "demo", "--cluster", "1xcpu"])
    assert shown.exit_code == 0 and "GPU" not in shown.output
    assert "tokens/s per CPU rank" in shown.output and "Python and its libraries" in shown.output
    checked = CliRunner().invoke(app, ["plan", "--check", "demo", "--cluster", "1xcpu", "--json"])
    assert json.loads(checked.stdout)["kind"] == "CPU"
    scaled = CliRunner().invoke(app, ["plan", "--check", "demo", "--cluster", "1xcpu", "--scale", "1,2"])
    assert scaled.exit_code == 0 and "GPU" not in scaled.output
    with pytest.raises(UserError, match="2 ranks on CPUs"):
        predict(job(), parse_cluster("2xcpu"))
