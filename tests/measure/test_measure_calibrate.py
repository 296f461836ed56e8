"""A calibration of this CPU over tiny shapes: everything is in the profile, which is read back as it was written."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.hardware import Profile, profile_of, read_profile, write_profile
from meshwright.hardware.profile import OperationName, ProductKind
from meshwright.job import load_job
from meshwright.job.devices import Cluster
from meshwright.measure import calibrate, calibrate_shapes, operations
from meshwright.measure.calibrate_shapes import AttentionShape, Shapes
from meshwright.measure.together import Together
from meshwright.plan import predict
from meshwright.verify import run_ranks

DECODER: dict[str, int | str | bool] = {"vocab_size": 64, "width": 16, "heads": 2, "ffn_width": 32}
TINY = Shapes(
    dtypes=("fp32",),
    narrow=("bf16",),
    tokens=(64,),
    projections=((64, 32), (32, 64)),
    heads=((32, 128, 32),),
    attentions=(AttentionShape("fp32", 2, 4, 2, 16, 32),),
    losses=((32, 128),),
    copies=(2**16,),
    updates=(4096, 256),
    operations=tuple((name, 32, 16) for name in get_args(OperationName)),
    decoders=((DECODER, "none"), (DECODER, "selective")),
    shared=(DECODER,),
)
FEW = replace(TINY, narrow=(), operations=(), decoders=())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def profile() -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "QUICK_LIMIT_S", 600.0)  # a loaded machine must not leave anything out
        return calibrate.Calibration(CPU, True, lambda part: None, TINY).profile()


@pytest.mark.thorough
def test_everything_is_measured(profile: Profile) -> None:
    assert {(one.kind, one.rows) for one in profile.products} >= {("forward", 64), ("weight sum", 128)}
    assert {one.kind for one in profile.products if one.dtype == "bf16"} == set(get_args(ProductKind))
    assert {one.kernel for one in profile.attentions} == {"cpu", "cpu, masked"}
    assert profile.copies and profile.losses and profile.updates and profile.launch_s and profile.kernel_s
    assert all(one.clipped for one in profile.updates) and profile.process_bytes
    assert {one.name for one in profile.operations} == set(get_args(OperationName))
    for rows in (profile.products, profile.attentions, profile.operations):
        assert {one.dtype for one in rows} == {"fp32", "bf16"}
    assert {one.dtype for one in profile.losses} == {None, "bf16"}
    only_forward = {one.name for one in profile.operations if not one.backward_s}
    assert only_forward == {"fill"}
    assert {(one.model["layers"], one.recompute) for one in profile.decoders} == {
        (layers, recompute) for layers in (2, 6) for recompute in ("none", "selective")
    }
    assert profile.torch == torch.__version__ and not profile.skipped


def test_the_profile_says_cpu(profile: Profile) -> None:
    assert profile.gpu == "cpu" and profile.kind == "CPU" and profile.device.startswith("CPU ")
    assert f"{torch.get_num_threads()} thread" in profile.device and profile.units == torch.get_num_threads()


def test_a_profile_is_read_as_it_was_written(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(profile, tmp_path / "cpu.json")
    assert read_profile(tmp_path / "cpu.json") == profile
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    assert profile_of("cpu") == profile
    prediction = predict(load_job("demo").job, Cluster(gpu="cpu"))
    assert prediction.step_s > 0 and prediction.mfu is None
    assert not any("no profile" in guess for guess in prediction.guessed)


def test_what_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: calibrate.Calibration, *sizes: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(calibrate.Calibration, "_loss_s", full)
    profile = calibrate.Calibration(CPU, True, lambda part: None, FEW).profile()
    assert not profile.losses and profile.products
    assert profile.skipped == ("a loss over 32 × 128 logits: out of memory",)


def _with_another_rank() -> tuple[Profile, tuple[str, ...]]:
    """One rank finds no room for a loss, as its memory may be fuller."""

    def full(self: calibrate.Calibration, *sizes: object) -> float:
        raise torch.OutOfMemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "QUICK_LIMIT_S", 600.0)
        patch.setattr(operations, "_DECODER_REPEATS", 1)
        if dist.get_rank() == 1:
            patch.setattr(calibrate.Calibration, "_loss_s", full)
        found = calibrate.Calibration(CPU, True, lambda part: None, replace(TINY, narrow=()), ranks=2).profile()
    return found, found.skipped


@pytest.mark.thorough
def test_ranks_measure_together() -> None:
    """Both have the same figures, the slower rank's, and what fails on one is left out on both."""
    (own, here), (other, there) = run_ranks(_with_another_rank, 2)
    for name in ("products", "attentions", "copies", "updates", "operations", "decoders", "losses", "kernel_s"):
        assert getattr(own, name) == getattr(other, name), name
    assert own.products and own.operations and not own.losses
    ways = [(one.model["layers"], one.recompute, one.zero) for one in own.decoders]
    every = [(layers, "none", zero) for zero in (None, 0, 1, 2, 3) for layers in (2, 6)]
    assert ways == [*every, (2, "selective", None), (6, "selective", None)]
    assert here == ("a loss over 32 × 128 logits: failed on another rank",)
    assert there == ("a loss over 32 × 128 logits: out of memory",)


def test_what_an_emulated_format_would_take_long_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_CPU_LONGEST_S", 0.0)
    shapes = replace(TINY, narrow=("bf16",), operations=(), decoders=())
    profile = calibrate.Calibration(CPU, True, lambda part: None, shapes).profile()
    [first] = [one for one in profile.products if one.dtype == "bf16"]
    assert (first.rows, first.columns, first.inner) == (64, 64, 64)
    assert {one.dtype: one.kernel for one in profile.attentions} == {"fp32": "cpu, masked", "bf16": "cpu, masked"}


@pytest.mark.thorough
def test_narrow_formats_take_no_time_from_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are last, so that what a profile has of fp32 does not depend on them."""
    tried = []
    attempt = calibrate.Calibration._try

    def noted(self: calibrate.Calibration, what: str, *arguments: Any) -> Any:
        tried.append("bf16" in what)
        return attempt(self, what, *arguments)

    monkeypatch.setattr(calibrate.Calibration, "_try", noted)
    monkeypatch.setattr(calibrate, "QUICK_LIMIT_S", 600.0)
    calibrate.Calibration(CPU, True, lambda part: None, replace(TINY, decoders=())).profile()
    assert tried == sorted(tried) and any(tried)


def test_the_first_sizes_of_an_operation_tell_rows_from_width() -> None:
    """If time runs out after three, they still determine a plane; three on a line were off by a factor of two."""
    sizes: dict[str, list[list[float]]] = {}
    for name, rows, width in calibrate_shapes.shapes_for(CPU).operations:
        sizes.setdefault(name, []).append([1.0, math.log2(rows), math.log2(width)])
    assert set(sizes) == set(get_args(OperationName))
    for operation, found in sizes.items():
        volume = abs(torch.linalg.det(torch.tensor(found[:3], dtype=torch.float64)).item())
        assert volume > 2 - 1e-9, operation


def test_decoders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down meanwhile slows all of them alike: what a block takes beside the ends stays."""
    slower = itertools.count(100)

    def step(shape: Any, *_: Any) -> Any:
        return lambda: (float(shape[0]["layers"] * next(slower)), 1.0)

    monkeypatch.setattr(operations, "_decoder_step", step)
    [group] = replace(TINY, decoders=((DECODER, "none"),)).decoder_groups(1)
    few, many = operations.measured_decoders(group, CPU, Together())
    assert many.forward_s / few.forward_s == pytest.approx(6 / 2, rel=0.02)


def test_time_that_runs_out_leaves_the_coarse_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "QUICK_LIMIT_S", 0.0)
    profile = calibrate.Calibration(CPU, True, lambda part: None, FEW).profile()
    assert len(profile.products) == 1 and "finer shapes: time ran out" in profile.skipped


def test_a_device_on_which_nothing_works_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: calibrate.Calibration, *sizes: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(calibrate.Calibration, "_product_s", full)
    with pytest.raises(UserError, match="nothing could be measured"):
        calibrate.Calibration(CPU, True, lambda part: None, FEW).profile()


def test_the_command_writes_where_plans_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_shapes, "_CPU", replace(FEW, operations=TINY.operations))
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path / "profiles"))
    done = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu", "--json"])
    report = json.loads(done.stdout)
    assert report["kind"] == "CPU" and report["ranks"] == 1 and report["threads"] == torch.get_num_threads()
    assert report["file"] == str(tmp_path / "profiles" / "cpu.json") and report["copy_bytes_per_s"] > 0
    checked = CliRunner().invoke(app, ["plan", "--check", "demo", "--cluster", "1xcpu", "--json"])
    assert json.loads(checked.stdout)["step_s"] > 0 and json.loads(checked.stdout)["kind"] == "CPU"
    assert report["exported"] is None
    shown = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu"])
    assert "CPU" in shown.output and "GPU" not in shown.output


def test_an_export_describes_itself_and_is_used_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_shapes, "_CPU", FEW)
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path / "here"))
    site = tmp_path / "site"
    site.mkdir()
    words = ["calibrate", "--quick", "--device", "cpu", "--json", "--export", str(site)]
    report = json.loads(CliRunner().invoke(app, words).stdout)
    assert report["exported"] == str(site / "cpu.json")
    exported = json.loads((site / "cpu.json").read_text())
    assert exported["format"] == 2 and exported["torch"] == torch.__version__
    assert exported["machine"] and exported["host_cores"] and exported["meshwright"] and "calibrate" in exported["how"]
    assert read_profile(site / "cpu.json") == read_profile(tmp_path / "here" / "cpu.json")
    again = CliRunner().invoke(app, words)  # a folder keeps what it has unless --force
    assert isinstance(again.exception, UserError) and "--export" in str(again.exception)
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path / "elsewhere"))
    for given in (site, site / "cpu.json"):
        check = ["plan", "--check", "demo", "--cluster", "1xcpu", "--profile", str(given), "--json"]
        answer = json.loads(CliRunner().invoke(app, check).stdout)
        assert answer["step_s"] > 0 and answer["profile"].endswith(f"(from {site / 'cpu.json'})")
