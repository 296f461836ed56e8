"""Samples with pictures for a check of the run itself: small, on disk, each of a size that a sequence holds."""

import json
import random
from pathlib import Path
from typing import Any

from meshwright.data import SHAPES
from meshwright.data.made import noise
from meshwright.data.raw import SYNTHETIC
from meshwright.job import Job
from meshwright.job.data import Data
from meshwright.job.fields import MediaField
from meshwright.job.vision import Vision
from meshwright.verify.shrink import Change

WIDTH, HEIGHT = 12, 10
"""Of the pictures: neither square nor of the encoder's size, so that they are cut and resized."""
LETTERS = "abcdefgh "
FEWEST_LETTERS = 3


def pictures_for(data: Data, vision: Vision) -> tuple[Data, list[Change]]:
    """A data section whose samples have pictures for a small encoder, and what is changed for that."""
    if not data.fields:
        notes = [Change(f"data.sources {SYNTHETIC} → {SHAPES}")] if SYNTHETIC in data.sources else []
        return data.model_copy(update={"sources": (SHAPES,), "weights": None, "stages": ()}), notes
    mean, std = vision.colours
    own = {"kind": "image", "size": vision.image_size, "tokens": vision.tokens, "placeholder": vision.image_token}
    own |= {"column": None, "folder": None, "mean": mean, "std": std}
    fields = {name: MediaField.model_validate(field.model_dump() | own) for name, field in data.fields.items()}
    changes: dict[str, Any] = {"fields": fields, "items_per_sequence": vision.images, "encoder": None, "decode": "cpu"}
    notes = [
        Change(f'data.fields.{name}.kind "{field.kind}" → "image"', hides=True)
        for name, field in data.fields.items()
        if field.kind != "image"
    ]
    if data.encoder is not None:
        notes.append(Change(f"data.encoder {data.encoder} → the declared steps", hides=True))
    if data.decode != "cpu":
        notes.append(Change(f'data.decode "{data.decode}" → "cpu"', hides=True))
    return data.model_copy(update=changes), notes


def write_samples(folder: Path, job: Job, windows: float, seed: int) -> str:
    """Write samples that fill a number of sequences: JSONL, and the pictures that it names; returns the JSONL file."""
    folder.mkdir()
    data, length = job.data, job.batch.sequence_length
    # Samples that are joined share a sequence.
    longest = length if data.join is None else length // len(data.sources)
    field = next(iter(data.fields.values()))
    assert field.tokens is not None and data.items_per_sequence is not None
    chance, lines = random.Random(seed), list[str]()
    while windows > 0:
        pictures = chance.randint(0, min(data.items_per_sequence, (longest - FEWEST_LETTERS - 2) // field.tokens))
        letters = chance.randint(FEWEST_LETTERS, longest - pictures * field.tokens - 2)
        text = "".join(chance.choices(LETTERS, k=letters - 1)) + "."
        record: dict[str, Any] = {}
        for number in range(pictures):
            name, file = chance.choice(list(data.fields)), f"{len(lines)}-{number}.bmp"
            (folder / file).write_bytes(_bitmap(chance.randrange(1 << 30)))
            record.setdefault(name, []).append(file)
            text = f"{text[: letters // 2]}<{name}>{text[letters // 2 :]}"
        lines.append(json.dumps(record | _texts(text, data, len(lines))) + "\n")
        windows -= 1 if data.packing == "none" else (pictures * field.tokens + letters + 1) / length
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    return str(folder / "samples.jsonl")


def _texts(text: str, data: Data, number: int) -> dict[str, Any]:
    if data.format == "conversations":
        return {"prompt": text[:-1], "completion": text[-1]}
    own = {data.text_field: text}
    return own if data.join is None else own | {data.join: number}


def _bitmap(key: int) -> bytes:
    """A BMP of noise, which any reader of pictures decodes to the same bytes."""
    pixels = noise(3 * WIDTH * HEIGHT, key).tobytes()
    sizes = b"".join(size.to_bytes(4, "little") for size in (54 + len(pixels), 0, 54, 40, WIDTH, HEIGHT))
    planes, bits = (1).to_bytes(2, "little"), (24).to_bytes(2, "little")
    return b"BM" + sizes + planes + bits + bytes(24) + pixels
