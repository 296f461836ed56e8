"""Runs of a model that reads pictures: resumed exactly, frozen parts left alone, LLaVA folders both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from meshwright.errors import UserError
from meshwright.job import Model, load_job, model_to_hf_config
from meshwright.launch.worker import run_job
from meshwright.model import Decoder, initialise, to_hf_state
from meshwright.runs.huggingface import export_run, import_folder

SMALL = [
    *("model.width=16", "model.layers=2", "model.heads=2", "model.ffn_width=32", "data.workers=0"),
    *("model.vision.width=16", "model.vision.layers=2", "model.vision.heads=2", "model.vision.ffn_width=32"),
    *("batch.global_batch=8", "batch.micro_batch=4", "evaluation.every_steps=0", "run.device=cpu"),
]


def train(run: Path, *overrides: str, job: str = "vlm-tiny", resume: bool = False) -> list[dict[str, Any]]:
    run_job(load_job(job, [*overrides, f"run.folder={run}"]), Console(quiet=True), resume=resume)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA model with a CLIP encoder, its last block unused."""
    shape = Model(
        vocab_size=48,
        width=16,
        layers=2,
        heads=2,
        ffn_width=32,
        vision={
            "kind": "clip",
            "image_size": 32,
            "patch": 8,
            "width": 12,
            "layers": 2,
            "heads": 2,
            "ffn_width": 20,
            "select_layer": -2,
            "image_token": 1,
        },
    )
    model, path = Decoder(shape), tmp_path_factory.mktemp("llava")
    initialise(model, seed=3)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    (path / "config.json").write_text(json.dumps(model_to_hf_config(shape)))
    save_file(to_hf_state(model), path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.thorough
def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *SMALL, "run.steps=6", "schedule.warmup_steps=2")
    kept = ["checkpoint.every_steps=3", "run.steps=6", "schedule.warmup_steps=2"]
    train(tmp_path / "parts", *SMALL, *kept)
    (tmp_path / "parts" / "checkpoints" / "step-00000006").rename(tmp_path / "last")
    resumed = train(tmp_path / "parts", *SMALL, *kept, resume=True)
    assert resumed[-3:] == whole[3:] and len(whole) == 6


def test_import_and_export_give_the_same_files(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back", "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")]
    assert configs[0].items() <= configs[1].items()


@pytest.mark.thorough
@pytest.mark.parametrize("train_parts", [["projector", "decoder"], ["projector"]])
def test_parts_that_are_not_trained_stay_as_they_are(folder: Path, tmp_path: Path, train_parts: list[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
[model]
init_from = "{folder}"
[model.vision]
train = {json.dumps(train_parts)}
[data]
sources = ["builtin:shapes"]
workers = 0
[batch]
sequence_length = 32
global_batch = 4
micro_batch = 4
[schedule]
warmup_steps = 1
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 2
[precision]
compute = "bf16"
[run]
steps = 4
device = "cpu"
"""
    )
    run = tmp_path / "run"
    first = train(run, job=str(job))
    (run / "checkpoints" / "step-00000004").rename(tmp_path / "last")
    assert (
        train(run, job=str(job), resume=True)[-2:] == first[2:]
    )  # the weights that no checkpoint has come from the folder again
    export_run(run, tmp_path / "out", "fp32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    expected = ["multi_modal_projector."] + (["language_model."] if "decoder" in train_parts else [])
    assert {name.split(".")[0] + "." for name in changed} == set(expected)
    stored = load_file(next((run / "checkpoints").glob("*/model.safetensors")))
    assert {name.split(".")[1] for name in stored if name.startswith("vision.")} == {"projector"}


def test_a_model_without_pictures_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text about nothing. " * 400)
    with pytest.raises(UserError, match=r"model.vision is set, but data.sources deliver no pictures"):
        train(
            tmp_path / "run",
            *SMALL,
            f'data.sources=["{tmp_path / "text.txt"}"]',
            f"data.cache={tmp_path / 'cache'}",
            "model.vocab_size=300",
            "run.steps=2",
            "schedule.warmup_steps=1",
        )


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("batch.sequence_length=24", "too short for the 27 tokens of a sequence"),
        ("model.vocab_size=20", "words of builtin:shapes"),
        ('data.sources=["builtin:shapes", "builtin:stdlib"]', "leave it alone in the list"),
    ],
)
def test_drawings_that_do_not_fit_are_refused(tmp_path: Path, override: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        train(tmp_path / "run", *SMALL, override, "run.steps=2", "schedule.warmup_steps=1")
