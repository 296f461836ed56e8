"""Runs of a model that listens: it learns, resumes exactly, reads sound files, and leaves frozen parts alone."""

import json
import wave
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from meshwright.checkpoint import load_weights, newest_weights
from meshwright.data import IGNORE, Batch, Slots
from meshwright.data.batch import stack_samples
from meshwright.data.tones import ToneWindows
from meshwright.errors import UserError
from meshwright.job import Model, load_job
from meshwright.launch.worker import run_job
from meshwright.model import Decoder, initialise
from meshwright.runs.huggingface import export_run

SMALL = [
    *("model.width=16", "model.layers=2", "model.heads=2", "model.ffn_width=32", "data.workers=0"),
    *("model.audio.width=16", "model.audio.layers=1", "model.audio.heads=2", "model.audio.ffn_width=32"),
    *("batch.global_batch=8", "batch.micro_batch=4", "evaluation.every_steps=0", "run.device=cpu"),
]


def train(run: Path, *overrides: str, job: str = "speech-tiny", resume: bool = False) -> list[dict[str, Any]]:
    run_job(load_job(job, [*overrides, f"run.folder={run}"]), Console(quiet=True), resume=resume)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows if "loss" in row]


def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    steps = ["run.steps=4", "schedule.warmup_steps=2", "checkpoint.every_steps=2"]
    whole = train(tmp_path / "run", *SMALL, *steps)
    (tmp_path / "run" / "checkpoints" / "step-00000004").rename(tmp_path / "last")
    resumed = train(tmp_path / "run", *SMALL, *steps, resume=True)
    assert resumed[-2:] == whole[2:] and len(whole) == 4


@pytest.mark.thorough
def test_it_learns_to_hear_a_key() -> None:
    """The recipe's task at its smallest, one key in one window; it writes down keys that it has not heard."""
    shape = Model(
        vocab_size=18,
        width=32,
        layers=1,
        heads=2,
        audio={"mels": 20, "seconds": 0.12, "width": 32, "layers": 1, "heads": 2},
    )
    assert shape.audio is not None
    model = Decoder(shape)
    initialise(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    heard, unheard = (
        _one_key(ToneWindows(Slots.of(shape.audio), 8, split), count) for split, count in ((0, 512), (1, 128))
    )
    for step in range(240):
        batch = heard.select(slice(64 * step % 512, 64 * step % 512 + 64))
        model(batch.tokens_BS, batch.labels_BS, batch.valid_count(), media=batch.media).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        written_BS = model(unheard.tokens_BS, media=unheard.media).argmax(-1)
    right_B = ((written_BS == unheard.labels_BS) | (unheard.labels_BS == IGNORE)).all(1)
    assert right_B.float().mean() >= 0.9


def _one_key(windows: ToneWindows, count: int) -> Batch:
    numbers = list(islice((n for n in range(len(windows)) if len(windows.dialled(n).keys) == 1), count))
    return stack_samples([windows.read(number) for number in numbers], numbers)


def test_no_hugging_face_family_has_it(tmp_path: Path) -> None:
    train(tmp_path / "run", *SMALL, "run.steps=1", "schedule.warmup_steps=1", "checkpoint.every_steps=1")
    with pytest.raises(UserError, match=r"model\.audio matches no Hugging Face family"):
        export_run(tmp_path / "run", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("batch.sequence_length=28", "too short for the 31 tokens of a sequence of builtin:tones"),
        ("model.vocab_size=16", "less than the 19 words of builtin:tones"),
        ('data.sources=["builtin:tones", "builtin:stdlib"]', "leave it alone in the list"),
        ("model.audio.windows=1", "whose sounds last up to 0.5 seconds"),
        ('data.sources=["builtin:shapes"]', r"has pictures, and the model reads none; set \[model.vision\]"),
    ],
)
def test_sounds_that_do_not_fit_are_refused(tmp_path: Path, override: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        train(tmp_path / "run", *SMALL, override, "run.steps=2", "schedule.warmup_steps=1")


def test_sound_files_are_read_and_frozen_parts_stay(tmp_path: Path) -> None:
    """A sound takes as many windows as it fills; what is not trained is not saved, and a run continues without it."""
    pytest.importorskip("av")
    rng = np.random.default_rng(0)
    with (tmp_path / "sounds.jsonl").open("w") as records:
        for number in range(24):
            with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                samples = 1600 * (1 + number % 3)
                file.writeframes((3000 * rng.standard_normal(samples)).astype(np.int16).tobytes())
            records.write(json.dumps({"audio": f"{number}.wav", "text": f"<audio> sound number {number}"}) + "\n")
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
[model]
vocab_size = 300
width = 16
layers = 1
heads = 2
[model.audio]
mels = 8
seconds = 0.2
windows = 2
width = 16
layers = 1
heads = 2
audio_token = 3
train = ["projector", "decoder"]
[data]
sources = ["{tmp_path / "sounds.jsonl"}"]
cache = "{tmp_path / "cache"}"
packing = "best-fit"
mask_documents = true
validation_fraction = 0.0
workers = 0
[data.fields.audio]
kind = "audio"
[batch]
sequence_length = 64
global_batch = 2
micro_batch = 2
[schedule]
warmup_steps = 1
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 1
[run]
steps = 2
device = "cpu"
"""
    )
    field = load_job(str(job)).job.data.fields["audio"]
    assert (field.mels, field.seconds, field.windows, field.tokens, field.placeholder) == (8, 0.2, 2, 10, 3)
    run = tmp_path / "run"
    first = train(run, job=str(job))
    stored = load_file(run / "checkpoints" / "step-00000001" / "model.safetensors")
    names = [name for name in stored if name.startswith("audio.")]
    assert names and all(name.startswith("audio.projector.") for name in names)
    (run / "checkpoints" / "step-00000002").rename(tmp_path / "last")
    assert train(run, job=str(job), resume=True)[-1] == first[-1]


def test_a_frozen_encoder_of_a_whisper_folder_stays_and_is_known_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    config = transformers.WhisperConfig(
        vocab_size=60,
        num_mel_bins=10,
        max_source_positions=13,
        decoder_layers=1,
        decoder_attention_heads=2,
        **sizes,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    )
    folder, run = tmp_path / "whisper", tmp_path / "run"
    theirs = transformers.WhisperModel(config)
    theirs.save_pretrained(folder)
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
[model]
vocab_size = 32
width = 16
layers = 1
heads = 2
[model.audio]
init_from = "{folder}"
windows = 2
train = ["projector", "decoder"]
[data]
sources = ["builtin:tones"]
workers = 0
[batch]
sequence_length = 32
global_batch = 2
micro_batch = 2
[schedule]
warmup_steps = 1
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 1
[run]
steps = 2
device = "cpu"
"""
    )
    first = train(run, job=str(job))
    shape = load_job(str(job)).job.model
    model = Decoder(shape)
    load_weights(newest_weights(run), model)
    features = torch.randn(2, 10, 26)
    with torch.no_grad():
        assert model.audio is not None
        expected = theirs.get_encoder()(features).last_hidden_state
        torch.testing.assert_close(model.audio.encoded(features), expected, rtol=1e-5, atol=1e-5)
    (run / "checkpoints" / "step-00000002").rename(tmp_path / "last")
    assert train(run, job=str(job), resume=True)[-1] == first[-1]
    with torch.no_grad():
        theirs.encoder.conv1.weight.add_(0.1)
    theirs.save_pretrained(folder)
    with pytest.raises(UserError, match=r"was trained next to other weights than those of .* model\.audio\.init_from"):
        load_weights(newest_weights(run), model)
