"""One device: accumulation, masks, precision, clipping and bad steps do what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from waiting import SlowWorker

from meshwright.data import Stream, prepare
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.model import Decoder, initialise
from meshwright.parallel import PipeDream, WholeWeights, World, build
from meshwright.train import Outcome, Silent, Trainer, build_optimizer, clip_gradients


class Memory(Silent):
    """Recorder and progress that remember."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.samples: dict[int, str] = {}

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def sample(self, step: int, text: str) -> None:
        self.samples[step] = text

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def run(tiny_job: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tiny_job.parent)

    def train(*overrides: str, change=lambda training: None) -> tuple[Memory, Outcome, Trainer]:
        job = load_job(str(tiny_job), ["data.cache=cache", *overrides]).job
        corpus = prepare(job.data, job.model.vocab_size)
        memory = Memory()
        world = World(torch.device("cpu"))
        engine, weights = build(job, world)
        assert not isinstance(engine, PipeDream)
        training = Trainer(job, corpus, engine, weights, memory, memory, world)
        change(training)
        return memory, training.run(), training

    return train


def test_the_loss_falls_and_every_step_is_recorded(run) -> None:
    memory, outcome, _ = run("run.steps=30")
    assert memory.column("step")[-1] == 30 and len(memory.column("loss")) == 30
    assert memory.column("loss")[-1] < 0.8 * memory.column("loss")[0]
    assert outcome.first_val_loss is not None and outcome.val_loss < 0.8 * outcome.first_val_loss
    assert memory.column("mfu") == [None] * 30  # a CPU's peak is not known
    assert memory.events[0]["kind"] == "start" and "12·L·S·A" in memory.events[0]["flops_convention"]
    assert set(memory.samples) == {5, 10, 15, 20, 25, 30}


@pytest.mark.parametrize("masks", ["false", "true"])
def test_accumulation_gives_the_whole_batch_s_gradients_with_unequal_masks(run, masks: str) -> None:
    whole, _, _ = run("batch.micro_batch=4", f"data.mask_documents={masks}", "run.steps=4")
    parts, _, _ = run("batch.micro_batch=1", f"data.mask_documents={masks}", "run.steps=4")
    for name in ("loss", "grad_norm"):
        assert parts.column(name) == pytest.approx(whole.column(name), rel=2e-5)


def test_two_runs_of_one_seed_are_identical_and_another_seed_differs(run) -> None:
    first, again, other = (run(f"run.seed={seed}", "model.dropout=0.1")[0] for seed in (1, 1, 2))
    assert first.column("loss") == again.column("loss")
    assert first.column("grad_norm") == again.column("grad_norm")
    assert first.column("loss") != other.column("loss")


def test_loader_workers_do_not_change_the_run(run) -> None:
    assert run("data.workers=0")[0].column("loss") == run("data.workers=2")[0].column("loss")


def test_a_worker_that_is_waited_for_is_an_event(run, monkeypatch, tmp_path) -> None:
    worker, read, record = SlowWorker(tmp_path, monkeypatch, 0.2, sample=8), Stream.read, Memory.event

    def read_late(self: Stream, sample: int):
        if sample == 9:
            worker.read()
        return read(self, sample)

    def record_and_report(self: Memory, kind: str, **fields: Any) -> None:
        record(self, kind, **fields)
        if kind == "slow_data":
            worker.report(fields["waiting"])

    monkeypatch.setattr(Stream, "read", read_late)
    monkeypatch.setattr(Memory, "event", record_and_report)
    run("data.workers=1", "run.steps=4")
    [sentence] = worker.sentences
    assert re.search(r"for data worker 0 of 1 \(process \d+, reading the step of sample 8\)", sentence)


def test_dropout_and_micro_batches_draw_the_same_masks(run) -> None:
    whole, _, _ = run("model.dropout=0.2", "batch.micro_batch=4", "run.steps=3")
    parts, _, _ = run("model.dropout=0.2", "batch.micro_batch=1", "run.steps=3")
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=2e-5)


def _poison(training: Trainer) -> None:
    with torch.no_grad():
        training.weights.masters["layers.0.ffn.down.weight"].fill_(float("nan"))


def test_a_bad_step_stops_skips_or_is_kept_as_the_job_says(run) -> None:
    with pytest.raises(UserError, match="step 1 has loss nan"):
        run("run.on_bad_step=stop", change=_poison)
    memory, _, training = run("run.on_bad_step=skip", "run.steps=2", change=_poison)
    assert [event["policy"] for event in memory.events if event["kind"] == "bad_step"] == ["skip", "skip"]
    assert training.weights.masters["layers.0.ffn.gate.weight"].isfinite().all()
    _, _, training = run("run.on_bad_step=keep", "run.steps=1", change=_poison)
    assert training.weights.masters["layers.0.ffn.gate.weight"].isnan().any()


@pytest.mark.thorough
def test_compiled_blocks_compute_the_same(run, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, _, _ = run("run.steps=2")
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    compiled, _, _ = run("run.steps=2", "run.compile=true")
    assert compiled.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)


def test_bf16_accumulates_in_fp32_and_leaves_no_second_set_of_gradients(tiny_job: Path) -> None:
    job = load_job(str(tiny_job)).job
    model = Decoder(job.model)
    initialise(model, 0)
    reference = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = WholeWeights(model, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(weights.masters[name], reference[name]) for name in reference)

    tokens, labels = torch.arange(16).reshape(2, 8), torch.arange(1, 17).reshape(2, 8)
    expected: dict[str, torch.Tensor] = {}
    for row in range(2):
        probe = Decoder(job.model)
        probe.load_state_dict(reference)
        probe.bfloat16()
        probe(tokens[row : row + 1], labels[row : row + 1], 16).backward()
        for name, p in probe.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad.float()
    for row in range(2):
        model(tokens[row : row + 1], labels[row : row + 1], 16).backward()
    for name, master in weights.masters.items():
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, expected[name])
    assert all(p.grad is None for p in model.parameters())

    with torch.no_grad():
        weights.masters["final_norm.weight"].add_(1e-4)  # less than a bf16 step: only the master may move
    weights.refresh()
    assert weights.masters["final_norm.weight"].max() > 1.0
    assert torch.equal(model.final_norm.weight, torch.ones_like(model.final_norm.weight))


def test_bf16_learns_too(run) -> None:
    memory, _, training = run("precision.compute=bf16", "run.steps=6", "batch.global_batch=2", "batch.micro_batch=2")
    assert memory.column("loss")[-1] < memory.column("loss")[0]
    assert all(master.dtype == torch.float32 for master in training.weights.masters.values())


def test_only_matrices_are_decayed(tiny_job: Path) -> None:
    job = load_job(str(tiny_job), ["model.qkv_bias=true"]).job
    model = Decoder(job.model)
    optimizer = build_optimizer(dict(model.named_parameters()), job)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "layers.0.attention.q.weight" in names and "embed.weight" in names
    assert not [name for name in names if "norm" in name or name.endswith("bias")]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_clipping_scales_the_global_norm() -> None:
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(1)})
    weights = WholeWeights(model, torch.float32)
    weights.masters["a"].grad, weights.masters["b"].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert float(weights.square_sum()) == pytest.approx(49.0)
    for limit in (0.0, 7.0):
        clip_gradients(weights.masters.values(), 7.0, limit)
        assert weights.masters["b"].grad.tolist() == [6.0]
    clip_gradients(weights.masters.values(), 7.0, 3.5)
    assert weights.masters["a"].grad.tolist() == pytest.approx([1.0, 1.5])
