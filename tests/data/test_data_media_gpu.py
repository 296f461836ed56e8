"""Decoding on the GPU: what can be said of it without one, and with one the whole."""

import io
import itertools
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from data_media import IMAGE, captioned, film, noise, picture, write_tar
from PIL import Image, ImageOps

from meshwright.data import Loader, gpu_decoder, prepare, training_stream
from meshwright.data.media.carried import EncodedItem, EncodedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.film import frames_of
from meshwright.data.media.gpu import GpuDecoder, cut_and_resized, upright
from meshwright.data.media.pictures import cut_of, open_picture, turn_of, upright_size
from meshwright.data.media.pictures import picture as cpu_picture
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import ItemPlan, MediaField
from meshwright.model import Media


def data_of(tmp_path, **changes) -> Data:
    samples = captioned(range(20), noise)
    samples[3] = ("3", {"png": picture(3, "PNG"), "txt": b"not a JPEG"})
    samples[4] = ("4", {"jpg": held(6), "txt": b"turned"})
    source = write_tar(tmp_path / "a.tar", samples)
    how = {"fields": {"image": {**IMAGE, "crop": "random", "flip": True}}, "decode": "gpu", **changes}
    return Data(sources=(source,), cache=str(tmp_path / "cache"), validation_fraction=0.0, **how)


@pytest.mark.parametrize("crop", ["center", "random", "squash"])
def test_the_gpus_steps_make_nearly_what_pillow_makes(crop):
    field = MediaField(kind="image", size=24, tokens=1, crop=crop, flip=True)
    for number in range(6):
        raw = noise(number, side=96)
        pixels = torch.from_numpy(np.array(open_picture(raw, field).convert("RGB"))).permute(2, 0, 1)
        cut = cut_of(field, 96, 96, Chance(7, number))
        theirs = cut_and_resized(pixels, cut, 24).numpy().astype(int)
        ours = cpu_picture(raw, field, Chance(7, number)).astype(int)
        assert np.abs(ours - theirs).mean() < 3, (crop, number)


def held(number: int) -> bytes:
    """A JPEG whose EXIF data says that the camera was held some way."""
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = number
    Image.open(io.BytesIO(noise(number, side=96))).crop((0, 0, 96, 64)).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


@pytest.mark.parametrize("number", range(1, 9))
def test_pictures_of_a_camera_that_was_turned_are_upright(number):
    raw, field = held(number), MediaField(kind="image", size=64, tokens=1, crop="random", flip=True)
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
    image = open_picture(raw, field)
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    turned = upright(pixels, *turn_of(image))
    assert torch.equal(turned, torch.from_numpy(np.array(seen)).permute(2, 0, 1)) and upright_size(image) == seen.size
    stream = io.BytesIO()
    seen.save(stream, "PNG")
    plain, cut = stream.getvalue(), cut_of(field, *seen.size, Chance(7, number))
    assert np.array_equal(cpu_picture(raw, field, Chance(7, number)), cpu_picture(plain, field, Chance(7, number)))
    there = cpu_picture(raw, field, Chance(7, number)).astype(int)
    assert np.abs(cut_and_resized(turned, cut, 64).numpy().astype(int) - there).mean() < 3


def test_it_falls_back_with_a_sentence(tmp_path):
    told = []
    assert gpu_decoder(data_of(tmp_path), torch.device("cpu"), told.append) is None
    assert told == ['data.decode = "gpu" is not used, since this run is on cpu; the data workers decode']
    assert gpu_decoder(data_of(tmp_path, decode="cpu"), torch.device("cpu"), told.append) is None and len(told) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_not_decoded_by_the_device_is_the_same(tmp_path, workers, monkeypatch):
    """The whole way of a step that is decoded by the process that trains, with Pillow in the place of NVJPEG."""
    data = data_of(tmp_path)
    stream = training_stream(prepare(data, 300), data, 64, 3)
    monkeypatch.setattr(GpuDecoder, "_pictures", lambda self, items: {})

    def steps(**how):
        loader = Loader(stream, global_batch=4, workers=workers, **how)
        try:
            return [step.batch for step in itertools.islice(loader, 3)]
        finally:
            loader.close()

    for one, other in zip(steps(), steps(decoder=GpuDecoder(data, torch.device("cpu"))), strict=True):
        assert torch.allclose(one.media.items_BK, other.media.items_BK, atol=1e-6)
        assert torch.equal(one.media.places_BKT, other.media.places_BKT)


class PyAvCodec:
    """Stands for PyNvVideoCodec, which needs a GPU: the same calls, answered by PyAV."""

    OutputColorType = SimpleNamespace(RGBP="RGBP")
    made: ClassVar[list[str]] = []

    class SimpleDecoder:
        def __init__(self, name, **how):
            assert how["output_color_type"] == "RGBP" and how["use_device_memory"]
            PyAvCodec.made.append(name)
            self.reconfigure_decoder(name)

        def reconfigure_decoder(self, name):
            import av

            with av.open(name) as container:
                self._frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

        def __len__(self):
            return len(self._frames)

        def get_batch_frames_by_index(self, numbers):
            return [torch.from_numpy(self._frames[number]).permute(2, 0, 1) for number in numbers]


def test_films_share_a_decoder_and_one_that_is_damaged_does_not_spoil_the_next(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", PyAvCodec)
    monkeypatch.setattr("meshwright.data.media.gpu.ENGINES", 1)
    monkeypatch.setattr(PyAvCodec, "made", [])
    field = {"kind": "video", "size": 16, "tokens": 1, "frames": 2}
    data = Data(sources=("none",), fields={"video": field}, decode="gpu", damaged="blank")
    raws = [film(range(number, number + 6)) for number in range(3)]
    raws.insert(1, raws[0][: raws[0].index(b"\x1f\x43\xb6\x75") + 12])  # its header alone
    items = tuple(EncodedItem(row, 0, 0, raw, 0, 2, None, 0, f"film {row}") for row, raw in enumerate(raws))
    waiting = EncodedMedia(ItemPlan((3, 16, 16), 1, 2), torch.zeros(4, 2, 1, dtype=torch.int64), items)
    media, lost = GpuDecoder(data, torch.device("cpu")).decode(waiting)
    assert [name.partition(" (")[0] for name in lost] == ["film 1"] and len(PyAvCodec.made) == 2
    for row in (0, 2, 3):
        there = frames_of(raws[row], data.fields["video"], Chance(None))
        assert np.abs((media.items_BK[row].numpy() * 0.5 + 0.5) * 255 - there).mean() < 3


def test_nvdec_is_given_no_other_format(tmp_path, monkeypatch):
    """Its demuxer would read the files of a list, or wait on a port."""
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", PyAvCodec)
    monkeypatch.setattr(PyAvCodec, "made", [])
    (tmp_path / "private.mkv").write_bytes(film(range(4)))
    raw = f"ffconcat version 1.0\nfile {tmp_path}/private.mkv\n".encode()
    data = Data(sources=("none",), fields={"video": {"kind": "video", "size": 16, "tokens": 1}}, decode="gpu")
    items = (EncodedItem(0, 0, 0, raw, 0, 2, None, 0, "film 0"),)
    waiting = EncodedMedia(ItemPlan((3, 16, 16), 1, 2), torch.zeros(1, 2, 1, dtype=torch.int64), items)
    with pytest.raises(UserError, match=r"film 0 cannot be decoded \(is no film in a known format; those are AAC"):
        GpuDecoder(data, torch.device("cpu")).decode(waiting)
    assert PyAvCodec.made == []


def test_a_step_is_decoded_while_the_one_before_it_trains(tmp_path):
    """A decoder that waits until the step before was handed out: it would wait for ever if it decoded on demand."""
    data = data_of(tmp_path)
    stream = training_stream(prepare(data, 300), data, 64, 3)
    decoder, taken, begun = GpuDecoder(data, torch.device("cpu")), threading.Event(), []

    def decode(waiting):
        begun.append(threading.current_thread())
        if len(begun) == 2:
            assert taken.wait(60)
        return Media(torch.full((1,), float(len(begun))), waiting.places_BKT), []

    decoder.decode = decode
    loader = Loader(stream, global_batch=4, decoder=decoder)
    try:
        first = next(loader)
        assert loader.position == 4 and float(first.batch.media.items_BK) == 1
        taken.set()
        assert float(next(loader).batch.media.items_BK) == 2 and loader.position == 8
    finally:
        loader.close()
    assert threading.main_thread() not in begun
    assert next(loader).batch.sample_ids_B.tolist() == [8, 9, 10, 11], "what was read ahead is read again"
    loader.close()


def test_an_error_of_the_next_step_does_not_keep_this_one_from_training(tmp_path):
    data = data_of(tmp_path)
    stream = training_stream(prepare(data, 300), data, 64, 3)
    decoder = GpuDecoder(data, torch.device("cpu"))
    answers = iter([(None, []), UserError("the second step")])

    def decode(waiting):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    decoder.decode = decode
    loader = Loader(stream, global_batch=4, decoder=decoder)
    next(loader)
    with pytest.raises(UserError, match="the second step"):
        next(loader)
    assert loader.position == 4 and not loader.readers.started


@pytest.mark.gpu
@pytest.mark.parametrize("decode", ["gpu", "dali"])
def test_the_gpu_makes_nearly_what_pillow_makes(tmp_path, decode):
    if decode == "dali":
        pytest.importorskip("nvidia.dali", reason="nvidia.dali, a wheel of 425 MB, is not installed")
    data = data_of(tmp_path, decode=decode)
    stream = training_stream(prepare(data, 300), data, 64, 3)
    decoder = gpu_decoder(data, torch.device("cuda", 0), pytest.fail)
    cpu, gpu = (next(iter(Loader(stream, global_batch=8, decoder=used))).batch.media for used in (None, decoder))
    assert gpu.items_BK.is_cuda and torch.equal(cpu.places_BKT, gpu.places_BKT.cpu())
    assert (cpu.items_BK - gpu.items_BK.cpu()).abs().mean() < 3 / 127.5
