"""Runs and checkpoints as objects: rows, weights as tensors, any box of any tensor, text, exports."""

from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.errors import UserError

JOB = {"run.steps": 6, "checkpoint.every_steps": 3, "evaluation.every_steps": 3, "layout.dp_shard": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> meshwright.Run:
    """Six steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("some words to learn from, and a few more\n\n" * 400)
    data = {"data.sources": [str(folder / "text.txt")], "data.cache": str(folder / "cache"), "data.workers": 0}
    sizes = {"batch.sequence_length": 32, "batch.global_batch": 4, "batch.micro_batch": 2, "run.device": "cpu"}
    job = meshwright.load_job(
        "tiny-llama", set={**JOB, **data, **sizes, "run.folder": str(folder / "run"), "data.validation_fraction": 0.1}
    )
    return meshwright.train(job, nproc=2)


@pytest.mark.thorough
def test_a_run_tells_what_was_and_is(run: meshwright.Run) -> None:
    again = meshwright.open_run(run.path)
    assert again.state == "done" and repr(again) == f"Run({str(run.path)!r}, done, step 6)"
    assert [row["step"] for row in again.rows] == again.column("step") == [1, 2, 3, 4, 5, 6]
    assert again.losses == again.column("loss") and [row["step"] for row in again.evaluations] == [0, 3, 6]
    assert again.job.layout.dp_shard == 2 and again.job.model.preset == "tiny-llama"
    assert again.events("start")[0]["attempt"] == 0 and again.samples == {}


def test_weights_are_whole_whatever_saved_them(run: meshwright.Run) -> None:
    from meshwright.model import Decoder

    weights = run.weights()
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(run.job.model).named_parameters()}
    assert {name: values.shape for name, values in weights.items()} == shapes
    assert all(values.dtype == torch.float32 and values.isfinite().all() for values in weights.values())


def test_a_checkpoint_gives_any_box_of_any_tensor(run: meshwright.Run) -> None:
    newest = meshwright.Checkpoint(run.path)
    older = run.checkpoints[1]
    assert [one.step for one in run.checkpoints] == [6, 3] and meshwright.Checkpoint(older.path).step == 3
    name = "model/embed.weight"
    whole = newest[name]
    assert name in newest and name in newest.names("model/") and whole.shape == newest.shape(name)
    assert torch.equal(newest.read(name, (slice(5, 300), slice(2, 9))), whole[5:300, 2:9])
    assert torch.equal(newest.read(name, (slice(-7, None),)), whole[-7:])
    assert newest.read(name, (slice(9, 3),)).numel() == 0
    assert len(newest) == len(list(newest)) and newest.facts["step"] == 6 and newest.job()["run"]["steps"] == 6
    assert name in newest.differences(older) and newest.differences(meshwright.Checkpoint(run.path)) == {}
    newest.verify()


def test_mistakes_are_named(run: meshwright.Run, tmp_path: Path) -> None:
    newest = run.checkpoint
    with pytest.raises(UserError, match=r"has no tensor model/embed\.wight; did you mean model/embed\.weight\?"):
        newest["model/embed.wight"]
    with pytest.raises(UserError, match="takes every 2th entry"):
        newest.read("model/embed.weight", (slice(0, 9, 2),))
    with pytest.raises(UserError, match="has 2 dims and the box 3"):
        newest.read("model/embed.weight", (slice(1),) * 3)
    with pytest.raises(UserError, match="is not a run folder"):
        meshwright.open_run(tmp_path)
    with pytest.raises(UserError, match="neither a run folder nor a checkpoint"):
        meshwright.Checkpoint(tmp_path)


def test_it_writes_and_is_written(run: meshwright.Run, tmp_path: Path) -> None:
    text = run.generate("some words", 5, temperature=0, device="cpu")
    assert text.startswith("some words") and text == run.generate("some words", 5, temperature=0, device="cpu")
    assert run.report().read_text().startswith("<!doctype html>")
    exported = run.checkpoints[1].export(tmp_path / "third")
    assert (exported / "model.safetensors").is_file() and (run.export(tmp_path / "sixth") / "config.json").is_file()
    from safetensors.torch import load_file

    third, sixth = (load_file(tmp_path / name / "model.safetensors") for name in ("third", "sixth"))
    assert torch.equal(third["model.embed_tokens.weight"], run.checkpoints[1]["model/embed.weight"])
    assert torch.equal(sixth["model.embed_tokens.weight"], run.checkpoint["model/embed.weight"])
