"""Pictures of unusual kinds have the pixels that a viewer shows; and sentences about files that are not right."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_media import IMAGE, film, huge_png, tone
from PIL import Image

from meshwright.data import prepare
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import Damaged
from meshwright.data.media.film import frames_of
from meshwright.data.media.pictures import picture
from meshwright.data.media.sound import windows_of
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.job.data import Data
from meshwright.job.fields import MediaField

FIELD = MediaField(kind="image", size=16, tokens=1, crop="squash")
LEVELS = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)


def saved(image: Image.Image, form: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **how)
    return stream.getvalue()


def made(raw: bytes) -> Any:
    return picture(raw, FIELD, Chance(None)).astype(int)


def test_grey_of_16_bits_keeps_its_levels() -> None:
    deep = saved(Image.fromarray(LEVELS.astype(np.uint16) * 257), "PNG")
    assert Image.open(io.BytesIO(deep)).mode in ("I", "I;16")
    assert (made(deep) == LEVELS).all(), "and not 255 wherever there is some light"


def test_colours_for_print_and_palettes_and_films_of_pictures() -> None:
    colours = Image.new("RGB", (16, 16), (200, 40, 90))
    for raw in (
        saved(colours.convert("CMYK"), "JPEG", quality=95),
        saved(colours.convert("RGBA"), "PNG"),
        saved(colours.convert("P"), "PNG"),
        saved(colours, "GIF", save_all=True, append_images=[Image.new("RGB", (16, 16), (0, 255, 0))]),
        saved(colours, "WEBP", save_all=True, lossless=True, append_images=[Image.new("RGB", (16, 16))]),
    ):
        assert np.abs(made(raw).mean((1, 2)) - (200, 40, 90)).max() < 30


def test_a_cameras_notes_that_cannot_be_read_do_not_matter() -> None:
    plain = saved(Image.fromarray(LEVELS), "JPEG")
    notes = b"Exif\0\0MM\0*" + struct.pack(">I", 1 << 30)
    broken = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(notes) + 2) + notes + plain[2:]
    assert (made(broken) == made(plain)).all()


def test_a_picture_that_pillow_does_not_open_is_told_in_our_words() -> None:
    with pytest.raises(Damaged, match=r"has more than 178,956,970 pixels, the most that Pillow opens"):
        made(huge_png(60_000, 50_000))


def test_a_film_that_is_cut_short_is_told_without_a_file_that_is_none() -> None:
    with pytest.raises(Damaged) as error:
        frames_of(film(range(30))[:400], MediaField(kind="video", size=16, tokens=1), Chance(None))
    assert "<none>" not in str(error.value) and "Errno" not in str(error.value)


def test_one_sample_is_a_sound_and_none_is_not() -> None:
    field = MediaField(kind="audio", tokens=1, rate=8000, mels=8, seconds=0.2)
    one = windows_of(tone(400, 1 / 8000), field)
    assert one.shape == (1, 8, 20) and np.isfinite(one).all()
    with pytest.raises(Damaged, match="holds no sound"):
        windows_of(tone(400, 0), field)


def test_a_field_that_no_record_has_is_said(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "a.png").write_bytes(saved(Image.new("RGB", (9, 9)), "PNG"))
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"photo": "a.png", "text": f"number {n}"}) + "\n" for n in range(5)))
    data = Data(sources=(str(source),), fields={"image": IMAGE}, cache=str(tmp_path / "cache"))
    said = "no record has data.fields.image; set its column to the name or ending of what holds it"
    assert said in prepare(data, 300).notes
    right = {"image": {**IMAGE, "column": "photo"}}
    assert said not in prepare(data.model_copy(update={"fields": Data(fields=right).fields}), 300).notes
    fields = tmp_path / "fields.toml"
    fields.write_text('[data.fields.image]\nkind = "image"\nsize = 8\ntokens = 1\n')
    words = ("--fields", str(fields), "--vocab-size", "300")
    done = cli("data", "prepare", str(source), "--out", str(tmp_path / "out"), *words)
    assert done.code == 0 and "items: 0 image" in done.out and said in " ".join(done.out.split())
    fields.write_text(fields.read_text() + 'column = "photo"\n')
    done = cli("data", "prepare", str(source), "--out", str(tmp_path / "other"), *words)
    assert done.code == 0 and "items: 5 image" in done.out and "no record" not in done.out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("sise = 8", r"data\.fields\.image\.sise is not a known setting; did you mean data\.fields\.image\.size\?"),
        ("rate = 50", r"data\.fields\.image\.rate = 50 is not allowed; it should be greater than or equal to 1000"),
    ],
)
def test_wrong_settings_of_a_field(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "job.toml").write_text(f'[data.fields.image]\nkind = "image"\nsize = 8\ntokens = 1\n{line}\n')
    with pytest.raises(UserError, match=sentence):
        load_job(str(tmp_path / "job.toml"))
