"""A run that stopped goes on bit for bit, with another layout too; what would not be a continuation is refused."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from meshwright.checkpoint import Checkpoint, Part, checkpoint_path, newest
from meshwright.checkpoint.shares import seal, write_share
from meshwright.data import prepare
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import RESTARTS, RUN_FOLDER, run_job
from meshwright.parallel import CompressedWeights, build, join_world
from meshwright.ranks import find_place
from meshwright.runs.folder import RunFolder
from meshwright.train import LossScale, make_trainer
from meshwright.verify.ranks import run_ranks

QUIET = Console(quiet=True)
SETTINGS = [
    "data.cache=cache", "checkpoint.every_steps=4", "evaluation.sample_tokens=0", "batch.sequence_length=16",
    "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32",
]  # fmt: skip
EXACT = ("step", "epochs", "loss", "grad_norm", "lr", "tokens", "val_loss", "loss_scale", "sent_bytes")


@pytest.fixture(autouse=True)
def _here(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)


def train(folder: str, *overrides: str, resume: bool = False) -> None:
    run_job(load_job("job.toml", [*SETTINGS, *overrides, f"run.folder={folder}"]), QUIET, resume=resume)


def rows(folder: str) -> list[list[str]]:
    """Every number that must be equal, as text, so that every bit counts."""
    return [[repr(row.get(name)) for name in EXACT] for row in RunFolder.open(Path(folder)).metrics()]


def events(folder: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder.open(Path(folder)).events() if event["kind"] == kind]


def cut_back(folder: str, to: str, step: int) -> None:
    """A run as it would be had it been killed when the checkpoint of a step was its newest."""
    shutil.copytree(folder, to)
    for path in Path(to, "checkpoints").glob("step-*"):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)


CASES = {
    "adamw": [],
    "fp16 with a loss scale": ["precision.compute=fp16"],
    "bf16, muon, int8 states": ["precision.compute=bf16", "optimizer.name=muon", "precision.optimizer_states=int8"],
    "offload": ['memory.offload=["optimizer"]', "precision.compute=bf16"],
    "blended in stages, best fit": [
        'data.sources=["corpus", "job.toml"]',
        "data.weights=[0.7, 0.3]",
        "data.packing=best-fit",
        "data.stages=[{tokens=320, weights=[0.2, 0.8]}]",
        "data.mask_documents=true",
    ],
    "dropout and workers": ["model.dropout=0.1", "data.workers=1", "optimizer.name=adafactor"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_a_resumed_run_are_those_of_one_left_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fp16" in case:  # one that changes in every few steps, so that it matters where it stood
        monkeypatch.setattr(LossScale, "of", classmethod(lambda cls, job: cls(2.0**21, grow_after=3)))
    overrides = [*CASES[case], "checkpoint.keep_last=9"]
    train("whole", *overrides)
    cut_back("whole", "run", 4)
    train("run", *overrides, resume=True)
    assert rows("run") == rows("whole") and len(rows("whole")) == 13
    assert newest(Path("run")).facts == newest(Path("whole")).facts
    if "fp16" in case:
        assert len({row.get("loss_scale") for row in RunFolder.open(Path("run")).metrics()}) > 3
    attempts = [row["attempt"] for row in RunFolder.open(Path("run")).metrics() if "loss" in row]
    assert attempts == [0] * 4 + [1] * 6
    [resumed] = events("run", "resume")
    assert resumed["step"] == 4 and resumed["changed"] == {"run.folder": ["whole", "run"]}
    assert [event["attempt"] for event in events("run", "start")] == [0, 1]
    assert RunFolder.open(Path("run")).state() == "done"
    assert not [entry for entry in Path("run/checkpoints").iterdir() if entry.name.startswith(".")]


LOST = {
    "adamw": "optimizer/layers.0.ffn.down.weight/",
    "adafactor": "optimizer/final_norm.weight/",
    "muon": "optimizer/layers.0.attention.q.weight/",
    "lion": "optimizer/",
    "sgd": "rng/",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOST)
def test_a_checkpoint_that_lacks_a_state_is_refused_by_its_name(name: str) -> None:
    lost = LOST[name]
    train("run", f"optimizer.name={name}", "run.steps=2")
    without(checkpoint_path(Path("run"), 2), lost)
    with pytest.raises(UserError, match=rf"step-00000002 lacks {lost}.*; remove this checkpoint"):
        train("run", f"optimizer.name={name}", "run.steps=4", resume=True)


@pytest.mark.parametrize("name", ["embed.weight", "final_norm.weight"])
def test_no_checkpoint_is_made_of_a_state_that_no_rank_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.train import state

    owned = state.owned_shards
    monkeypatch.setattr(state, "owned_shards", lambda shards: [held for held in owned(shards) if held != name])
    monkeypatch.setattr("meshwright.checkpoint.retries.WAITS_S", ())
    with pytest.raises(UserError, match=rf"model/{name} was written by no rank"):
        train("run", "run.steps=2")
    assert not list(Path("run/checkpoints").glob("step-*"))


def without(path: Path, lost: str) -> None:
    """Seal a checkpoint anew without the first of its tensors whose name begins so, or all of a group's."""
    with Checkpoint.open(path) as checkpoint:
        names = checkpoint.names(lost)
        assert names
        gone = set(names if lost == "optimizer/" else names[-1:])
        wholes = {name: checkpoint.whole(name) for name in checkpoint.names() if name not in gone}
        facts, job = checkpoint.facts, checkpoint.job()
    shutil.rmtree(path)
    path.mkdir()
    write_share(path, [Part(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in wholes.items()], 0, 1)
    seal(path, facts, 0, 1, job)


def test_an_empty_folder_is_begun_and_not_refused_as_no_run() -> None:
    Path("run").mkdir()
    train("run", "run.steps=2", resume=True)
    assert RunFolder.open(Path("run")).state() == "done"


def test_a_finished_run_resumed_does_nothing_and_a_longer_one_goes_on() -> None:
    train("run", "schedule.name=constant")
    before = newest(Path("run")).manifest
    train("run", "schedule.name=constant", resume=True)
    assert newest(Path("run")).manifest == before
    train("run", "schedule.name=constant", "run.steps=12", resume=True)
    train("long", "schedule.name=constant", "run.steps=12")
    steps = [row["step"] for row in RunFolder.open(Path("run")).metrics() if "loss" in row]
    assert steps == list(range(1, 13))
    names = newest(Path("long")).names("model/")
    one, other = newest(Path("run")), newest(Path("long"))
    assert all((one.whole(name) == other.whole(name)).all() for name in names)


def test_a_run_that_fails_while_a_save_is_under_way_still_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.train import Trainer

    step_of = Trainer.step

    def breaks(training: Any, step: int, *given: Any) -> bool:
        if step == 5:
            raise UserError("the fifth step")
        return step_of(training, step, *given)

    monkeypatch.setattr(Trainer, "step", breaks)
    with pytest.raises(UserError, match="the fifth step"):
        train("run")
    assert newest(Path("run")).facts.step == 4
    assert [event["kind"] for event in RunFolder.open(Path("run")).events()][-2:] == ["checkpoint", "stop"]


def test_without_a_checkpoint_it_starts_and_without_a_folder_too() -> None:
    train("run", "run.steps=3", resume=True)
    assert events("run", "resume") == []
    shutil.rmtree(Path("run/checkpoints"))
    train("run", "run.steps=3", resume=True)
    assert events("run", "resume")[0]["step"] == 0
    assert [row["step"] for row in RunFolder.open(Path("run")).metrics() if "loss" in row] == [1, 2, 3]
    with pytest.raises(UserError, match=r"--resume needs run\.folder"):
        run_job(load_job("demo", ["run.device=cpu"]), QUIET, resume=True)


def test_damaged_ones_are_named_and_the_previous_is_used(cli) -> None:
    words = [word for each in [*SETTINGS, "checkpoint.keep_last=9"] for word in ("--set", each)]
    assert cli("train", "job.toml", *words).code == 0
    whole = rows("run")
    for step, name in ((10, "manifest.json"), (8, "model.safetensors")):
        path = checkpoint_path(Path("run"), step) / name
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    result = cli("checkpoint", "verify", "run", "--json")
    damages = [row["damage"] is None for row in json.loads(result.out)["checkpoints"]]
    assert result.code == 1 and damages == [False, False, True]
    result = cli("train", "run", "--resume")
    assert result.code == 0, result.err
    assert "skipped: run/checkpoints/step-00000010/manifest.json" in result.out
    assert "skipped: run/checkpoints/step-00000008/model.safetensors was modified" in result.out
    assert "resuming from step 4 (attempt 1)" in result.out
    assert [event["error"].split()[0] for event in events("run", "checkpoint_refused")] == [
        "run/checkpoints/step-00000010/manifest.json", "run/checkpoints/step-00000008/model.safetensors"
    ]  # fmt: skip
    assert rows("run") == whole
    assert cli("checkpoint", "verify", "run").code == 0, "made again in their places"


REFUSED = {
    "run.seed=5": r"run\.seed = 5 cannot continue run/checkpoints/step-00000002, which was saved with 0; restore it",
    "batch.sequence_length=32": r"batch\.sequence_length = 32 cannot continue",
    "data.packing=best-fit": r"data\.packing = best-fit cannot continue",
    "optimizer.name=lion": r"optimizer\.name = lion cannot continue",
    "precision.optimizer_states=bf16": r"precision\.optimizer_states = bf16 cannot continue",
    "data.validation_fraction=0.4": r"data\.sources = \['corpus'\] does not produce the tokens",
    "model.ffn_width=96": r"layers\.0\.ffn\.gate\.weight has shape \(32, 32\), but the model needs \(96, 32\)",
    "model.tied=true": r"does not match the model: only one of them has head\.weight",
}


def test_what_would_be_no_continuation_is_refused_and_nothing_touched() -> None:
    train("run", "run.steps=2")
    before = {str(path): path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for override, sentence in REFUSED.items():
        with pytest.raises(UserError, match=sentence):
            train("run", "run.steps=4", override, resume=True)
    assert {str(path): path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    with pytest.raises(UserError, match="holds a run; add --resume to continue it"):
        train("run")


def test_a_larger_batch_continues_in_samples() -> None:
    train("run", "run.steps=4", "schedule.name=constant")
    train("run", "run.steps=6", "schedule.name=constant", "batch.global_batch=8", resume=True)
    tokens = [row["tokens"] for row in RunFolder.open(Path("run")).metrics() if "loss" in row]
    assert tokens == [64, 128, 192, 256, 384, 512]
    assert newest(Path("run")).facts.position == 4 * 4 + 2 * 8


def _ranks(folder: str, *overrides: str) -> None:
    place = find_place(os.environ)
    assert place is not None
    loaded = load_job("job.toml", [*SETTINGS, *overrides, f"run.folder={folder}", "batch.micro_batch=1"])
    run_job(loaded, QUIET, place, resume=True)


def _restarted(folder: str, *overrides: str) -> None:
    """As torch's agent starts ranks anew: with the words of the first start, in the launcher's folder."""
    place = find_place(os.environ)
    assert place is not None
    os.environ |= {RESTARTS: "1", RUN_FOLDER: str(Path(folder).absolute())}
    loaded = load_job("job.toml", [*SETTINGS, *overrides, f"run.folder={folder}", "batch.micro_batch=1"])
    run_job(loaded, QUIET, place)


COMPRESSED = ["layout.dp_replicate=2", "checkpoint.keep_last=9"]


@pytest.mark.thorough
@pytest.mark.parametrize("compress", ["topk", "powersgd"])
def test_error_feedback_goes_on_bit_for_bit_and_its_sum_outlives_another_number_of_replicas(compress: str) -> None:
    overrides = [*COMPRESSED, f"layout.compress={compress}", "layout.compress_ratio=0.1", "layout.compress_rank=1"]
    run_ranks(_ranks, 2, "whole", *overrides)
    for name in ("run", "plain", "four"):
        cut_back("whole", name, 4)
    run_ranks(_ranks, 2, "run", *overrides)
    assert rows("run") == rows("whole")
    assert events("run", "feedback_changed") == events("run", "feedback_dropped") == []

    train("plain", "checkpoint.keep_last=9", resume=True)
    assert len(events("plain", "feedback_dropped")) == 1
    if compress == "topk":
        run_ranks(_ranks, 4, "four", *overrides, "layout.dp_replicate=4", "run.steps=5", "schedule.name=constant")
        [changed] = events("four", "feedback_changed")
        assert changed["replicas"] == [2, 4] and changed["memory"] == "its sum is redistributed"


def _memories(folder: str, *overrides: str) -> dict[str, torch.Tensor]:
    """What each rank's replica has not sent yet, right after it was loaded."""
    job = load_job("job.toml", [*SETTINGS, *overrides, "batch.micro_batch=1"]).job
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    assert isinstance(weights, CompressedWeights)
    progress = SimpleNamespace(event=lambda *_, **__: None)
    training = make_trainer(job, prepare(job.data, job.model.vocab_size), engine, weights, progress, progress, world)
    training.resume(Checkpoint.open(checkpoint_path(Path(folder), 4)))
    return weights.reduction.memories


@pytest.mark.thorough
def test_what_was_not_sent_stays_the_same_in_all_whatever_the_number_of_replicas() -> None:
    run_ranks(_ranks, 2, "run", *COMPRESSED, "layout.compress=topk", "run.steps=4")
    for replicas in (2, 4):
        held = run_ranks(_memories, replicas, "run", "layout.compress=topk", f"layout.dp_replicate={replicas}")
        name = "layers.0.ffn.gate.weight"
        saved = sum(newest(Path("run")).whole(f"feedback/{replica:05d}/{name}") for replica in range(2))
        assert saved.abs().max() > 0
        torch.testing.assert_close(sum(memories[name] for memories in held), saved)


@pytest.mark.thorough
def test_what_was_not_sent_is_cut_anew_where_tp_changes() -> None:
    fields = ["layout.compress=topk", "model.kv_heads=2"]
    run_ranks(_ranks, 2, "run", *COMPRESSED, *fields, "run.steps=4")
    held = run_ranks(_memories, 4, "run", *fields, "layout.dp_replicate=2", "layout.tp=2")
    for replica in range(2):
        for name, dim in (("layers.0.ffn.gate.weight", 0), ("layers.0.ffn.down.weight", 1)):
            saved = newest(Path("run")).whole(f"feedback/{replica:05d}/{name}")
            halves = [held[2 * replica + tp][name] for tp in range(2)]
            assert saved.abs().max() > 0 and torch.equal(torch.cat(halves, dim), saved)


@pytest.mark.thorough
def test_pipedream_goes_on_where_its_pipeline_was_empty() -> None:
    overrides = ["layout.pp=2", "layout.schedule=pipedream", "model.layers=2", "model.tied=false"]
    overrides += ["checkpoint.keep_last=9", "batch.global_batch=1"]
    run_ranks(_ranks, 2, "whole", *overrides)
    cut_back("whole", "run", 4)
    run_ranks(_restarted, 2, "run", *overrides)
    assert rows("run") == rows("whole")


@pytest.mark.thorough
def test_a_stale_process_stops_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was believed dead wakes up in the middle of its run, after another has finished it."""
    from meshwright.train import Trainer

    step_of = Trainer.step
    seen = []

    def sleeps(training: Any, step: int, *given: Any) -> bool:
        if step == 6 and not seen:
            seen.append(step)
            train("run", resume=True)  # meanwhile
        return step_of(training, step, *given)

    monkeypatch.setattr(Trainer, "step", sleeps)
    with pytest.raises(UserError, match="was taken over by a later attempt"):
        train("run")
    assert RunFolder.open(Path("run")).state() == "done"
    assert [event["attempt"] for event in events("run", "start")] == [0, 1]
    train("alone")
    assert rows("run") == rows("alone")
    Checkpoint.open(checkpoint_path(Path("run"), 10)).verify()
