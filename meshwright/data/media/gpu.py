"""Decoding by the process that trains: on a GPU JPEG by NVJPEG (torchvision) and film by NVDEC (PyNvVideoCodec), whose
pixels stay there; or pictures by DALI, on a GPU or a CPU.

Workers read the bytes and hand them over; a thread of the process that trains decodes the next step's. What these
decoders do not take (PNG and its like with NVJPEG, sound) is decoded on the CPU as it always is.
"""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.data.media.carried import EncodedItem, EncodedMedia
from meshwright.data.media.chance import Chance
from meshwright.data.media.dali import MODULE, Dali, Part, takes
from meshwright.data.media.damage import Damaged, decoding
from meshwright.data.media.film import check_film
from meshwright.data.media.items import ItemMaker
from meshwright.data.media.nvdec import ENGINES, Nvdec
from meshwright.data.media.pictures import Cut, cut_of, open_picture, turn_of, upright_size
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import MediaField
from meshwright.model import Media

_NVDEC = "PyNvVideoCodec"
_MODULES = {"image": "torchvision.io", "video": _NVDEC}
Picture = tuple[EncodedItem, Any]
"""The bytes of a picture, and what Pillow read of its header."""


def gpu_decoder(data: Data, device: torch.device, report: Callable[[str], None]) -> "GpuDecoder | None":
    """What decodes in this process if data.decode asks for it; else None, with a sentence why not."""
    if not data.fields or data.decode == "cpu":
        return None
    why = _hindrance(data, device)
    if why is not None:
        report(f'data.decode = "{data.decode}" is not used, since {why}; the data workers decode')
        return None
    return GpuDecoder(data, device)


def _hindrance(data: Data, device: torch.device) -> str | None:
    """Why items cannot be decoded as data.decode asks."""
    kinds = {field.kind for field in data.fields.values()}
    if data.encoder is not None:
        return "data.encoder makes the items"
    if data.decode == "dali":
        if "image" not in kinds:
            return "DALI decodes pictures alone"
        return None if _there(MODULE) else f"{MODULE} is not installed (pip install 'meshwright[dali]')"
    if device.type != "cuda":
        return f"this run is on {device.type}"
    if kinds == {"audio"}:
        return "sound is decoded on the CPU"
    lacking = [module for kind, module in _MODULES.items() if kind in kinds and not _there(module)]
    return f"{lacking[0].partition('.')[0]} is not installed" if lacking else None


class GpuDecoder:
    """Makes the items of a batch on the device that trains."""

    def __init__(self, data: Data, device: torch.device) -> None:
        self._fields: Sequence[MediaField] = tuple(data.fields.values())
        self._maker = ItemMaker(data)
        self._device = device
        self._dali: Dali | None = None
        if data.decode == "dali":
            size = next(field.size for field in self._fields if field.size is not None)
            self._dali = Dali(device, max(1, data.workers), size)
        # DALI's films are NVDEC's where that is there, and PyAV's elsewhere.
        self._nvdec = Nvdec(device) if data.decode == "gpu" or (device.type == "cuda" and _there(_NVDEC)) else None
        self._engines = ThreadPoolExecutor(ENGINES, "nvdec")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def decode(self, waiting: EncodedMedia) -> tuple[Media, list[str]]:
        """The items in their slots, and the names of those that could not be decoded; by any thread, beside what the
        device computes on its default stream."""
        if self._stream is None:
            return self._decode(waiting)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            media, lost = self._decode(waiting)
            self._stream.synchronize()
        for tensor in (media.items_BK, media.places_BKT):
            tensor.record_stream(torch.cuda.default_stream(self._device))  # else its memory is reused while it is read
        return media, lost

    def _decode(self, waiting: EncodedMedia) -> tuple[Media, list[str]]:
        plan = waiting.plan
        shape = (len(waiting.places_BKT), plan.slots, *plan.shape)
        items_BK = torch.zeros(shape, device=self._device)
        lost = []
        films = {
            (item.row, item.slot): self._engines.submit(self._film, item)
            for item in waiting.items
            if self._fields[item.field].kind == "video"
        }
        pictures = self._pictures([item for item in waiting.items if self._fields[item.field].kind == "image"])
        for item in waiting.items:
            try:
                made = pictures.get((item.row, item.slot))
                if made is None:
                    film = films.get((item.row, item.slot))
                    made = self._on_cpu(item) if film is None else film.result()
                if len(made) < item.first + item.wanted:
                    raise Damaged("damaged", f"gives {len(made)} items")
            except Damaged as error:
                if self._maker.refuses:
                    raise UserError(
                        f'{item.name} cannot be decoded ({error}); prepare it again, or set data.damaged = "blank"'
                    ) from error
                lost.append(f"{item.name} ({error})")
                made = torch.zeros((item.first + item.wanted, *plan.shape), device=self._device)
            items_BK[item.row, item.slot : item.slot + item.wanted] = self._normalised(
                made[item.first : item.first + item.wanted]
            )
        return Media(items_BK, waiting.places_BKT.to(self._device)), lost

    def _pictures(self, items: Sequence[EncodedItem]) -> dict[tuple[int, int], Tensor]:
        """Those pictures that this decoder takes, by row and slot."""
        opened = [(item, image) for item in items if (image := self._opened(item)) is not None]
        return self._at_once(opened) if opened else {}

    def _at_once(self, opened: Sequence[Picture]) -> dict[tuple[int, int], Tensor]:
        """Pictures decoded all at once, or one by one if one is damaged, of which the CPU then says what is wrong."""
        try:
            return self._by_nvjpeg(opened) if self._dali is None else self._by_dali(self._dali, opened)
        except RuntimeError:
            if len(opened) == 1:
                return {}
        found: dict[tuple[int, int], Tensor] = {}
        for one in opened:
            found |= self._at_once([one])
        return found

    def _opened(self, item: EncodedItem) -> Any:
        """The header of a picture that this decoder takes, as Pillow reads it; None for what the CPU is to decode."""
        try:
            with decoding():
                image = open_picture(item.raw, self._fields[item.field])
                return image if (image.format == "JPEG" if self._dali is None else takes(image)) else None
        except Damaged:
            return None

    def _by_nvjpeg(self, opened: Sequence[Picture]) -> dict[tuple[int, int], Tensor]:
        decode_jpeg = importlib.import_module("torchvision.io").decode_jpeg
        raws = [torch.frombuffer(bytearray(item.raw), dtype=torch.uint8) for item, _ in opened]
        decoded = decode_jpeg(raws, mode="RGB", device=self._device)
        found = {}
        for (item, image), pixels in zip(opened, decoded, strict=True):
            part = cut_and_resized(upright(pixels, *turn_of(image)), self._cut(item, image), self._size(item))
            found[item.row, item.slot] = part[None]
        return found

    def _by_dali(self, dali: Dali, opened: Sequence[Picture]) -> dict[tuple[int, int], Tensor]:
        parts = []
        for item, image in opened:
            cut = self._cut(item, image)
            parts.append(Part(item.raw, cut.box(*upright_size(image)), cut.mirrored))
        made_N = dali.decode(parts)
        return {(item.row, item.slot): made[None] for (item, _), made in zip(opened, made_N, strict=True)}

    def _cut(self, item: EncodedItem, image: Any) -> Cut:
        return cut_of(self._fields[item.field], *upright_size(image), Chance(item.key, item.number))

    def _size(self, item: EncodedItem) -> int:
        size = self._fields[item.field].size
        assert size is not None
        return size

    def _film(self, item: EncodedItem) -> Tensor:
        if self._nvdec is None:
            return self._on_cpu(item)
        field, key = self._fields[item.field], Chance(item.key, item.number).draw_key()
        # NVDEC's own demuxer takes any format, and whatever it refers to; only films of ours may reach it.
        check_film(item.raw, field, decode=False)

        def made(frame_CHW: Tensor) -> Tensor:
            height, width = frame_CHW.shape[-2:]
            return cut_and_resized(frame_CHW, cut_of(field, width, height, Chance(key)), self._size(item))

        return self._nvdec.decode(item.raw, field.frames, made)

    def _on_cpu(self, item: EncodedItem) -> Tensor:
        made = self._maker.make(item.field, item.raw, Chance(item.key, item.number))
        return torch.from_numpy(made).to(self._device)

    def _normalised(self, items: Tensor) -> Tensor:
        if self._maker.scale is None:
            return items.float()
        mean, std = (torch.tensor(numbers, device=self._device).view(3, 1, 1) for numbers in self._maker.scale)
        return (items.float() / 255 - mean) / std


def upright(pixels_CHW: Tensor, quarters: int, mirrored: bool) -> Tensor:
    """A picture after some quarter turns against the clock, then mirrored or not."""
    turned = pixels_CHW.rot90(quarters, (-2, -1))
    return turned.flip(-1) if mirrored else turned


def cut_and_resized(pixels_CHW: Tensor, cut: Cut, size: int) -> Tensor:
    """A part of a picture at an item's size, as bytes; nearly what Pillow makes of the same part."""
    height, width = pixels_CHW.shape[-2:]
    left, top, right, bottom = (round(edge) for edge in cut.box(width, height))
    part = pixels_CHW[None, :, top : max(bottom, top + 1), left : max(right, left + 1)].float()
    made = functional.interpolate(part, (size, size), mode="bicubic", antialias=True, align_corners=False)
    made = made[0].round().clamp(0, 255).to(torch.uint8)
    return made.flip(-1) if cut.mirrored else made


def _there(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception:  # an extension that cannot be loaded fails with more than ImportError
        return None
