"""Fields of samples and the encoder that reads them: what one leaves out comes from the other, and both must fit."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Job, load_job

VISION = {"kind": "clip", "image_size": 32, "patch": 8, "width": 16, "layers": 1, "heads": 2, "images": 3}


def job_of(folder: Path, field: str, data: str = "") -> Job:
    file = folder / "job.toml"
    vision = "\n".join(f"{name} = {value!r}" for name, value in VISION.items())
    file.write_text(
        f'[model]\npreset = "tiny-llama"\n[model.vision]\n{vision}\n[data]\nsources = ["pictures.jsonl"]\n{data}\n'
        f"[data.fields.image]\n{field}\n[batch]\nsequence_length = 96\n"
    )
    return load_job(str(file)).job


def listening(folder: Path, field: str, data: str = "") -> Job:
    file = folder / "job.toml"
    file.write_text(
        '[model]\npreset = "tiny-llama"\n[model.audio]\nmels = 10\nseconds = 0.5\nwidth = 16\nlayers = 1\nheads = 2\n'
        f'windows = 2\n[data]\nsources = ["sounds.jsonl"]\n{data}\n[data.fields.sound]\n{field}\n'
        "[batch]\nsequence_length = 96\n"
    )
    return load_job(str(file)).job


def test_a_field_of_sound_takes_bands_length_tokens_and_slots_from_the_encoder(tmp_path: Path) -> None:
    job = listening(tmp_path, 'kind = "audio"')
    field = job.data.fields["sound"]
    assert (field.item_shape, field.tokens, field.windows, job.data.items_per_sequence) == ((10, 50), 25, 2, 2)


@pytest.mark.parametrize(
    ("field", "data", "sentence"),
    [
        ('kind = "audio"\nmels = 20', "", "items of 20 × 50 in 25 tokens, but model.audio reads 10 × 50 in 25"),
        ('kind = "image"\nsize = 8\ntokens = 4', "", "model.audio reads sound"),
        ('kind = "audio"', "items_per_sequence = 1", "differs from model.audio.windows = 2"),
    ],
)
def test_what_an_encoder_of_sound_does_not_read_is_refused(
    tmp_path: Path, field: str, data: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        listening(tmp_path, field, data)


def test_a_field_takes_size_tokens_colours_and_slots_from_the_encoder(tmp_path: Path) -> None:
    job = job_of(tmp_path, 'kind = "image"\nmean = [0.5, 0.5, 0.5]')
    field, vision = job.data.fields["image"], job.model.vision
    assert vision is not None and (field.size, field.tokens, job.data.items_per_sequence) == (32, 16, 3)
    assert field.mean == (0.5, 0.5, 0.5) and field.std == vision.colours[1]


@pytest.mark.parametrize(
    ("field", "data", "sentence"),
    [
        (
            'kind = "image"\nsize = 64',
            "",
            "items of 3 × 64 × 64 in 16 tokens, but model.vision reads 3 × 32 × 32 in 16",
        ),
        ('kind = "audio"\ntokens = 16', "", "model.vision reads pictures"),
        ('kind = "image"', "items_per_sequence = 2", "differs from model.vision.images = 3"),
    ],
)
def test_what_the_encoder_does_not_read_is_refused(tmp_path: Path, field: str, data: str, sentence: Any) -> None:
    with pytest.raises(UserError, match=sentence):
        job_of(tmp_path, field, data)
