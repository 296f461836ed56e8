"""fp16's loss scale: what it saves, one decision for all ranks, and the formats a device refuses."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import Step, prepare
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.layout import ranks_of
from meshwright.parallel import PipeDream, World, build
from meshwright.train import LossScale, Silent, Trainer, choose_device, emulated_format
from meshwright.train.feed import training_loader
from meshwright.verify import Observation, compare, observe, run_ranks, worst
from meshwright.verify.observe import LOSS_SCALE

MODEL = {
    "vocab_size": 51, "width": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 20,
    "max_sequence_length": 16,
}  # fmt: skip


def make_job(compute: str = "fp16", steps: int = 4, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": MODEL,
            "data": {"sources": ["builtin:synthetic"], "mask_documents": True, "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 1},
            "precision": {"compute": compute},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "layout": layout,
            "run": {"steps": steps},
        }
    )


def test_the_scale_halves_on_overflow_and_doubles_after_enough_good_steps() -> None:
    scale = LossScale(start=16.0, grow_after=3)
    assert [scale.overflowed(2.0, 1.0) for _ in range(2)] == [False, False]
    assert scale.overflowed(2.0, math.inf) and scale.overflowed(2.0, math.nan)
    assert (scale.scale, scale.skipped) == (4.0, 2)
    copy = LossScale(grow_after=3)
    copy.load_state_dict(scale.state_dict())
    for each in (scale, copy):
        grown = [each.scale for _ in range(6) if not each.overflowed(2.0, 1.0)]
        assert grown == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0] and each.skipped == 2


def test_what_no_scale_can_mend_is_left_to_the_policy_for_bad_steps() -> None:
    scale = LossScale(start=2.0)
    assert not scale.overflowed(math.nan, math.nan) and scale.scale == 2.0
    assert scale.overflowed(1.0, math.inf) and scale.scale == 1.0
    assert not scale.overflowed(1.0, math.inf) and scale.scale == 1.0
    assert not LossScale.of(make_job("bf16")).overflowed(1.0, math.inf)


class Overflowing(Trainer):
    """A run in which one rank's gradients overflow at one step."""

    def __init__(self, *args: Any, rank: int, at_step: int) -> None:
        super().__init__(*args)
        accumulate = self.engine.accumulate

        def accumulate_and_spoil(data: Step, step: int) -> torch.Tensor:
            loss = accumulate(data, step)
            if step == at_step and self.world.rank == rank:
                gradient = next(p.grad for p in self.weights.masters.values() if p.grad is not None)
                gradient.view(-1)[0] = math.inf
            return loss

        self.engine.accumulate = accumulate_and_spoil

    def run(self, *args: Any) -> Any:
        outcome = super().run(*args)
        assert (self.scaling.scale, self.scaling.skipped) == (LOSS_SCALE / 2, 1)
        return outcome


class Without(Trainer):
    """A run that sees every batch and leaves out one step's update."""

    def __init__(self, *args: Any, step: int) -> None:
        super().__init__(*args)
        self._left_out = step

    def _may_update(self, step: int, loss: float, norm: float, position: int) -> bool:
        return step != self._left_out


LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp_replicate": 2},
]


@pytest.fixture(scope="module")
def without_the_second_update() -> Observation:
    [seen] = run_ranks(observe, 1, make_job("fp32"), torch.float64, "cpu", None, partial(Without, step=2))
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_overflow_on_one_rank_skips_the_step_on_all(
    layout: dict[str, Any], without_the_second_update: Observation
) -> None:
    """In float64 with the scale on: only what the scale does differs from a run without that update."""
    job = make_job(**layout)
    overflowing = partial(Overflowing, rank=1, at_step=2)
    ranks = run_ranks(observe, ranks_of(job.layout), job, torch.float64, "cpu", None, overflowing)
    for seen in ranks:
        assert math.isinf(seen.norms[1]) and all(map(math.isfinite, seen.losses + seen.norms[2:]))
        seen.norms[1] = without_the_second_update.norms[1]
    rows = compare(ranks, without_the_second_update, "float64")
    assert all(row.ok for row in rows), worst(rows)


class Told(Silent):
    """Recorder and progress that remember."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def message(self, text: str) -> None:
        self.messages.append(text)


def training(job: Job, scale: LossScale) -> tuple[Trainer, Told]:
    world, told = World(torch.device("cpu")), Told()
    engine, weights = build(job, world)
    assert not isinstance(engine, PipeDream)
    made = Trainer(job, prepare(job.data, job.model.vocab_size), engine, weights, told, told, world)
    made.scaling = scale
    return made, told


def test_a_scale_too_large_for_fp16_is_found_out_step_by_step() -> None:
    made, told = training(make_job(steps=12), LossScale(start=2.0**28))
    made.run()
    skipped = [event["step"] for event in told.events if event["kind"] == "overflow"]
    assert skipped == list(range(1, len(skipped) + 1)) and 1 <= len(skipped) < 12
    scales = [row["loss_scale"] for row in told.rows]
    assert scales == [2.0 ** (28 - min(step, len(skipped))) for step in range(1, 13)]
    assert told.rows[-1]["skipped_steps"] == len(skipped) == len(told.messages)
    assert "update skipped, loss scale 268,435,456 → 134,217,728" in told.messages[0]
    norms = [row["grad_norm"] for row in told.rows]
    assert not any(map(math.isfinite, norms[: len(skipped)])) and all(map(math.isfinite, norms[len(skipped) :]))
    assert all(math.isfinite(row["loss"]) for row in told.rows)
    assert {int(state["step"]) for state in made.optimizer.state.values()} == {12 - len(skipped)}


def test_without_a_scale_fp16_loses_gradients_that_it_keeps_with_one() -> None:
    def zeros(scale: LossScale, compute: str = "fp16") -> tuple[int, float]:
        made, _ = training(make_job(compute), scale)
        data = Step(_one_batch(made), valid_count=2**20, tokens=2**20)  # as many tokens as a large step has
        made.engine.accumulate(scale.applied_to(data), 1)
        gradients = [p.grad for p in made.weights.masters.values() if p.grad is not None]
        norm = math.sqrt(float(made.weights.square_sum())) / scale.scale
        return sum(int((gradient == 0).sum()) for gradient in gradients), norm

    (none, exact) = zeros(LossScale(1.0, dynamic=False), "fp32")
    (lost, wrong), (kept, right) = zeros(LossScale(1.0)), zeros(LossScale())
    assert lost > 10 * kept and kept <= 1.1 * none
    assert right == pytest.approx(exact, rel=0.01) and wrong != pytest.approx(exact, rel=0.01)


def _one_batch(made: Trainer) -> Any:
    return next(iter(training_loader(made.job, made.corpus, made.world))).batch


def test_an_overflow_that_no_scale_mends_is_a_bad_step() -> None:
    made, told = training(make_job(), LossScale(start=1.0))
    made.weights.square_sum = lambda: torch.tensor(math.inf)
    with pytest.raises(UserError, match=r"step 1 has loss .* and gradient norm inf"):
        made.run()
    assert [event["kind"] for event in told.events] == ["start", "bad_step"]


def test_a_format_the_device_has_not_is_refused(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: str, compute: str) -> Job:
        return load_job(str(tiny_job), [f"run.device={device}", f"precision.compute={compute}"]).job

    with pytest.raises(UserError, match=r'"tf32" is only for GPUs, but run.device is the CPU; set "fp32"'):
        choose_device(on("cpu", "tf32"))
    cpu = choose_device(on("cpu", "fp8"))
    assert emulated_format(on("cpu", "fp8"), cpu) == "fp8" and emulated_format(on("cpu", "fp32"), cpu) is None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r'"fp8" needs compute capability 8.9, but NVIDIA A100 has 8.0; set it to "bf'):
        choose_device(on("cuda", "fp8"))
    assert choose_device(on("cuda", "tf32")).type == "cuda"
    for capability, cuda, fits in (((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        job = load_job(str(tiny_job), ["run.device=cuda", "precision.compute=fp8", "precision.fp8_scales=block"]).job
        if fits:
            assert choose_device(job).type == "cuda"
            continue
        with pytest.raises(
            UserError, match=r'"block" needs compute capability 9.0 and CUDA 12.9, but .*; set it to "row"'
        ):
            choose_device(job)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    for compute in ("tf32", "bf16"):
        with pytest.raises(UserError, match=r'needs compute capability 8.0.*set it to "fp16"'):
            choose_device(on("cuda", compute))
    assert choose_device(on("cuda", "fp16")).type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["tf32", "fp16", "fp8"])
def test_formats_train_evaluate_and_sample_on_a_gpu(cli, tiny_job: Path, compute: str) -> None:
    if compute == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    result = cli("train", "job.toml", "--set", "run.device=cuda", "--set", f"precision.compute={compute}", "--json")
    assert result.code == 0, result.err
    outcome = json.loads(result.out)
    assert outcome["val_loss"] < outcome["first_val_loss"] and outcome["sample"]
