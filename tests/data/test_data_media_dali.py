"""Pictures decoded by DALI on the CPU: what it makes, next to Pillow, and what becomes of those that it cannot read."""

import io
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_media import IMAGE, captioned, film, huge_png, noise, picture, write_tar
from PIL import Image

from meshwright.data import Loader, gpu_decoder, prepare, training_stream
from meshwright.data.media.carried import EncodedItem, EncodedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.dali import _AT_ONCE, Dali
from meshwright.data.media.film import frames_of
from meshwright.data.media.gpu import GpuDecoder
from meshwright.data.media.pictures import picture as cpu_picture
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import ItemPlan

CPU = torch.device("cpu")


@pytest.fixture
def dali():
    return pytest.importorskip("nvidia.dali", reason="nvidia.dali, a wheel of 425 MB, is not installed")


def saved(form: str, mode: str = "RGB", side: int = 96, orientation: int = 1, **how) -> bytes:
    """A picture without symmetry, as a file."""
    pixels = np.random.default_rng(5).integers(0, 256, (side // 8, side // 12, 3)).astype(np.uint8)
    image = Image.fromarray(pixels).resize((side * 2 // 3, side), Image.Resampling.BICUBIC).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image.save(stream, form, **({"exif": exif} if orientation != 1 else {}), **how)
    return stream.getvalue()


def items_of(data: Data, raws: list[bytes], key: int | None = 7) -> tuple[np.ndarray, list[str]]:
    """What the decoder of a section makes of pictures, one to a row, as whole levels."""
    field = next(iter(data.fields.values()))
    items = tuple(EncodedItem(row, 0, 0, raw, 0, 1, key, row, f"picture {row}") for row, raw in enumerate(raws))
    plan = ItemPlan(field.item_shape, 1, 1)
    waiting = EncodedMedia(plan, torch.zeros(len(raws), 1, 1, dtype=torch.int64), items)
    media, lost = GpuDecoder(data, CPU).decode(waiting)
    return (media.items_BK[:, 0].numpy() * 0.5 + 0.5) * 255, lost


def data_of(**field) -> Data:
    return Data(sources=("none",), fields={"image": {**IMAGE, **field}}, decode="dali", damaged="blank")


@pytest.mark.parametrize("crop", ["center", "random", "squash"])
def test_pictures_are_nearly_those_of_pillow(dali, crop):
    """More than one batch of the pipeline; where Pillow decodes at full size, no level is far off."""
    data = data_of(size=64, crop=crop, flip=True)
    raws = [noise(number, side=96) for number in range(_AT_ONCE + 6)]
    made, lost = items_of(data, raws)
    there = np.stack([cpu_picture(raw, data.fields["image"], Chance(7, row)) for row, raw in enumerate(raws)])
    assert not lost and np.abs(made - there).max() < 5 and np.abs(made - there).mean() < 0.5
    small = data_of(size=24, crop=crop, flip=True)
    made, _ = items_of(small, raws)
    there = np.stack([cpu_picture(raw, small.fields["image"], Chance(7, row)) for row, raw in enumerate(raws)])
    assert np.abs(made - there).mean() < 3


KINDS = {
    "progressive": saved("JPEG", progressive=True),
    "grey": saved("JPEG", "L"),
    "CMYK": saved("JPEG", "CMYK"),
    "half the colours": saved("JPEG", subsampling=2),
    "PNG": saved("PNG"),
    "palette": saved("PNG", "P"),
    "transparent": saved("PNG", "RGBA"),
    "WebP": saved("WEBP", lossless=True),
    "BMP": saved("BMP"),
    "GIF, by Pillow": saved("GIF", "P"),
    "film in a GIF, by Pillow": saved("GIF", "P", save_all=True, append_images=[Image.new("P", (64, 96))]),
    "grey of 16 bits, by Pillow": saved("PNG", "I;16"),
    **{f"held the {n}th way": saved("JPEG", orientation=n) for n in range(2, 9)},
    "PNG held the 6th way": saved("PNG", orientation=6),
}


def test_every_kind_of_picture_is_as_pillow_has_it(dali):
    data = data_of(size=64, crop="random", flip=True)
    made, lost = items_of(data, list(KINDS.values()))
    assert not lost
    for row, (kind, raw) in enumerate(KINDS.items()):
        there = cpu_picture(raw, data.fields["image"], Chance(7, row))
        difference = np.abs(made[row] - there)
        assert difference.mean() < 0.5 and difference.max() < 8, kind


def test_damaged_pictures_are_named_and_the_others_stay(dali):
    raws = [noise(number) for number in range(8)]
    raws[2], raws[4], raws[5], raws[6] = raws[2][:200], b"", b"a text " * 20, huge_png(12_000, 12_000)
    raws[7] = picture(7, "PNG")[:60]
    made, lost = items_of(data_of(), raws)
    assert [name.partition(" (")[0] for name in lost] == [f"picture {row}" for row in (2, 4, 5, 6, 7)]
    assert "max_pixels" in lost[3]
    for row in (0, 1, 3):
        assert np.abs(made[row] - cpu_picture(raws[row], data_of().fields["image"], Chance(7, row))).mean() < 3
    again, _ = items_of(data_of(), raws[:2])
    assert np.abs(again - made[:2]).max() < 1, "a pipeline that failed is built anew"
    refusing = data_of().model_copy(update={"damaged": "refuse"})
    with pytest.raises(UserError, match=r"picture 2 cannot be decoded .*data\.damaged"):
        items_of(refusing, raws)


def test_one_pipeline_goes_on_after_a_damaged_picture(dali):
    data = data_of()
    decoder, whole = GpuDecoder(data, CPU), noise(1)
    plan, places = ItemPlan((3, 16, 16), 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64)
    for raw in (whole, whole[:200], whole):
        item = EncodedItem(0, 0, 0, raw, 0, 1, None, 0, "one")
        media, lost = decoder.decode(EncodedMedia(plan, places, (item,)))
        assert bool(lost) == (raw is not whole)
    assert float(media.items_BK.abs().max()) > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_have_the_same_samples_and_nearly_the_same_pixels(dali, tmp_path, workers):
    samples = captioned(range(20), noise)
    samples[3] = ("3", {"gif": picture(3, "GIF"), "txt": b"not for DALI"})
    source = write_tar(tmp_path / "a.tar", samples)
    how = {"fields": {"image": {**IMAGE, "crop": "random", "flip": True}}, "decode": "dali"}
    data = Data(sources=(source,), cache=str(tmp_path / "cache"), validation_fraction=0.0, **how)
    stream = training_stream(prepare(data, 300), data, 64, 3)

    def steps(decoder):
        loader = Loader(stream, global_batch=4, workers=workers, decoder=decoder)
        try:
            return [step.batch for step in itertools.islice(loader, 4)]
        finally:
            loader.close()

    for one, other in zip(steps(None), steps(gpu_decoder(data, CPU, pytest.fail)), strict=True):
        assert torch.equal(one.media.places_BKT, other.media.places_BKT)
        assert torch.equal(one.sample_ids_B, other.sample_ids_B)
        filled = one.media.places_BKT[..., 0] >= 0
        assert (one.media.items_BK - other.media.items_BK)[filled].abs().mean() < 3 / 127.5


def test_films_next_to_pictures_are_decoded_as_ever(dali):
    fields = {"image": IMAGE, "video": {**IMAGE, "kind": "video", "frames": 2}}
    data = Data(sources=("none",), fields=fields, decode="dali")
    raw = film(range(6))
    items = (EncodedItem(0, 0, 0, noise(1), 0, 1, None, 0, "one"), EncodedItem(0, 1, 1, raw, 0, 2, None, 1, "film"))
    waiting = EncodedMedia(ItemPlan((3, 16, 16), 4, 3), torch.zeros(1, 3, 4, dtype=torch.int64), items)
    media, _ = GpuDecoder(data, CPU).decode(waiting)
    there = frames_of(raw, data.fields["video"], Chance(None))
    assert np.abs((media.items_BK[0, 1:].numpy() * 0.5 + 0.5) * 255 - there).max() < 1e-3


def test_a_pipeline_that_does_not_start_is_an_error(dali, monkeypatch):
    def fails(self):
        raise RuntimeError("Critical error when building pipeline:\nencountered:\n\nlibnvimgcodec.so is missing\nmore")

    monkeypatch.setattr(dali.Pipeline, "build", fails)
    with pytest.raises(UserError, match=r'"dali" cannot start a pipeline \(libnvimgcodec.so is missing\); pip install'):
        Dali(CPU, 1, 16)._built()


def told_by(data: Data) -> list[str]:
    told: list[str] = []
    assert gpu_decoder(data, CPU, told.append) is None
    return told


def test_it_falls_back_with_a_sentence(monkeypatch):
    sound = {"kind": "audio", "tokens": 4, "seconds": 0.5}
    (said,) = told_by(Data(fields={"audio": sound}, decode="dali"))
    assert said == 'data.decode = "dali" is not used, since DALI decodes pictures alone; the data workers decode'
    (said,) = told_by(Data(fields={"image": IMAGE}, decode="dali", encoder="own.py:Encoder"))
    assert "since data.encoder makes the items" in said
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (said,) = told_by(Data(fields={"image": IMAGE}, decode="dali"))
    assert "since nvidia.dali is not installed (pip install 'meshwright[dali]'); the data workers decode" in said


def test_training_says_once_why_it_is_not_used(tmp_path, cli, monkeypatch):
    write_tar(tmp_path / "a.tar", captioned(range(30)))
    (tmp_path / "job.toml").write_text(
        f"""
[model]
vocab_size = 300
width = 16
layers = 1
heads = 2
[model.vision]
image_size = 16
patch = 8
width = 16
layers = 1
heads = 2
[data]
sources = ["{tmp_path}/a.tar"]
cache = "{tmp_path}/cache"
decode = "dali"
workers = 0
[data.fields.image]
kind = "image"
[batch]
sequence_length = 32
global_batch = 2
micro_batch = 2
[schedule]
warmup_steps = 1
[evaluation]
every_steps = 0
[run]
steps = 1
device = "cpu"
folder = "{tmp_path}/run"
"""
    )
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    done = cli("train", str(tmp_path / "job.toml"))
    assert done.code == 0 and (done.out + done.err).count('data.decode = "dali" is not used') == 1


@pytest.mark.thorough
def test_nobody_who_does_not_ask_for_it_imports_it():
    root = Path(__file__).parents[2]
    code = (
        "import sys, meshwright.data, meshwright.train.feed; print([m for m in sys.modules if m.startswith('nvidia')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]", done.stderr
