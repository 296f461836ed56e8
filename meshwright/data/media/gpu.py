"""Decoding on the GPU: JPEG by NVJPEG through torchvision, film by NVDEC through PyNvVideoCodec, without a way back.

Workers read the bytes and hand them over; a thread of the process that trains decodes the next step's. What the GPU's
decoders do not take (PNG and its like, sound) is decoded on the CPU as it always is.
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
from meshwright.data.media.damage import Damaged
from meshwright.data.media.items import ItemMaker
from meshwright.data.media.nvdec import ENGINES, Nvdec
from meshwright.data.media.pictures import Cut, cut_of
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import MediaField
from meshwright.model import Media

_JPEG = b"\xff\xd8\xff"
_MODULES = {"image": "torchvision.io", "video": "PyNvVideoCodec"}


def gpu_decoder(data: Data, device: torch.device, report: Callable[[str], None]) -> "GpuDecoder | None":
    """What decodes on the device if data.decode asks for it; else None, with a sentence why not."""
    if not data.fields or data.decode == "cpu":
        return None
    kinds = {field.kind for field in data.fields.values()}
    why = None
    if device.type != "cuda":
        why = f"this run is on {device.type}"
    elif data.encoder is not None:
        why = "data.encoder makes the items"
    elif kinds == {"audio"}:
        why = "sound is decoded on the CPU"
    else:
        lacking = [module for kind, module in _MODULES.items() if kind in kinds and not _there(module)]
        why = f"{lacking[0].partition('.')[0]} is not installed" if lacking else None
    if why is not None:
        report(f'data.decode = "gpu" is not used, since {why}; the data workers decode')
        return None
    return GpuDecoder(data, device)


class GpuDecoder:
    """Makes the items of a batch on a GPU."""

    def __init__(self, data: Data, device: torch.device) -> None:
        self._fields: Sequence[MediaField] = tuple(data.fields.values())
        self._maker = ItemMaker(data)
        self._device = device
        self._nvdec = Nvdec(device)
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
        pictures = self._pictures([item for item in waiting.items if self._is_jpeg(item)])
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

    def _is_jpeg(self, item: EncodedItem) -> bool:
        return self._fields[item.field].kind == "image" and item.raw.startswith(_JPEG)

    def _pictures(self, items: Sequence[EncodedItem]) -> dict[tuple[int, int], Tensor]:
        """JPEGs decoded all at once; none where one of them is of a kind that NVJPEG does not take."""
        if not items:
            return {}
        decode_jpeg = importlib.import_module("torchvision.io").decode_jpeg
        raws = [torch.frombuffer(bytearray(item.raw), dtype=torch.uint8) for item in items]
        try:
            decoded = decode_jpeg(raws, mode="RGB", device=self._device)
        except RuntimeError:  # for all, if one is damaged: the CPU then says which
            return {}
        return {
            (item.row, item.slot): self._item(item, pixels)[None] for item, pixels in zip(items, decoded, strict=True)
        }

    def _item(self, item: EncodedItem, pixels_CHW: Tensor) -> Tensor:
        field = self._fields[item.field]
        assert field.size is not None
        height, width = pixels_CHW.shape[-2:]
        return cut_and_resized(pixels_CHW, cut_of(field, width, height, Chance(item.key, item.number)), field.size)

    def _film(self, item: EncodedItem) -> Tensor:
        field, key = self._fields[item.field], Chance(item.key, item.number).draw_key()

        def made(frame_CHW: Tensor) -> Tensor:
            assert field.size is not None
            height, width = frame_CHW.shape[-2:]
            return cut_and_resized(frame_CHW, cut_of(field, width, height, Chance(key)), field.size)

        return self._nvdec.decode(item.raw, field.frames, made)

    def _on_cpu(self, item: EncodedItem) -> Tensor:
        made = self._maker.make(item.field, item.raw, Chance(item.key, item.number))
        return torch.from_numpy(made).to(self._device)

    def _normalised(self, items: Tensor) -> Tensor:
        if self._maker.scale is None:
            return items.float()
        mean, std = (torch.tensor(numbers, device=self._device).view(3, 1, 1) for numbers in self._maker.scale)
        return (items.float() / 255 - mean) / std


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
