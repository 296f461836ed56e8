"""Films decoded by the GPU's own engines (NVDEC) through PyNvVideoCodec, several at once."""

import importlib
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from meshwright.data.media.damage import Damaged
from meshwright.data.media.film import sampled_numbers

ENGINES = 4
"""Films decoded at once: data-centre GPUs have 5 to 7 engines, others 1 to 3."""


class Nvdec:
    """A decoder for each thread that asks: to make one takes longer than to decode a short film."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def decode(self, raw: bytes, frames: int, made: Callable[[Tensor], Tensor]) -> Tensor:
        """What is made of so many frames at equal distances, each channels × height × width on the device."""
        # Its older versions open files by name alone; these bytes never reach a disk.
        with ExitStack() as inside:
            file = inside.enter_context(tempfile.NamedTemporaryFile(dir=_MEMORY))
            file.write(raw)
            file.flush()
            stream = self._stream()
            if stream is not None:
                inside.enter_context(torch.cuda.device(self._device))
                inside.enter_context(torch.cuda.stream(stream))
            codec = importlib.import_module("PyNvVideoCodec")
            try:
                decoder = self._decoder(codec, file.name, stream)
                numbers = sampled_numbers(len(decoder), frames)
                distinct = sorted(set(numbers))
                decoded = decoder.get_batch_frames_by_index(distinct)
            except Exception as error:  # its own exceptions are plain ones
                self._own.decoder = None  # what is left of this film must not meet the next one
                words = str(error).splitlines()
                raise Damaged("damaged", words[0][:120] if words else "NVDEC rejects it") from error
            items = {number: made(from_dlpack(frame)) for number, frame in zip(distinct, decoded, strict=True)}
            made_items = torch.stack([items[number] for number in numbers])
            if stream is not None:
                stream.synchronize()  # the next film is decoded into the same memory
        return made_items

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device.type == "cuda" and not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return getattr(self._own, "stream", None)

    def _decoder(self, codec: Any, name: str, stream: torch.cuda.Stream | None) -> Any:
        """This thread's decoder, which has opened the file."""
        if getattr(self._own, "decoder", None) is not None:
            self._own.decoder.reconfigure_decoder(name)
        else:
            self._own.decoder = codec.SimpleDecoder(
                name,
                gpu_id=self._device.index or 0,
                cuda_stream=0 if stream is None else stream.cuda_stream,
                use_device_memory=True,
                output_color_type=codec.OutputColorType.RGBP,
            )
        return self._own.decoder


_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112
