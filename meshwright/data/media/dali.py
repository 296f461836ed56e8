"""Pictures decoded, turned upright, cut and resized in batches by an NVIDIA DALI pipeline: on a GPU, or by threads of
its own on a CPU."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from meshwright.errors import UserError

MODULE = "nvidia.dali"
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")
_AT_ONCE = 64
"""Pictures of a pipeline's batch at most: all of them are in memory before they are resized."""


def takes(image: Any) -> bool:
    """Whether DALI makes of a picture what Pillow does, which opened it: not of films in a picture's file, and not of
    grey of 16 bits."""
    return image.format in _FORMATS and image.mode in _MODES and not getattr(image, "is_animated", False)


class Part(NamedTuple):
    """What is kept of a picture."""

    raw: bytes
    box: tuple[float, float, float, float]
    """Left, top, right and bottom in pixels of the upright picture."""
    mirrored: bool


class Dali:
    """A pipeline, built by the first batch: workers had better be forked before its threads start."""

    def __init__(self, device: torch.device, threads: int, size: int) -> None:
        self._device, self._threads, self._size = device, threads, size
        self._pipeline: Any = None

    def decode(self, parts: Sequence[Part]) -> Tensor:
        """Parts of pictures as bytes (N, 3, size, size), on the device; a `RuntimeError` for all if one is damaged."""
        return torch.cat([self._run(parts[first : first + _AT_ONCE]) for first in range(0, len(parts), _AT_ONCE)])

    def _run(self, parts: Sequence[Part]) -> Tensor:
        if self._pipeline is None:
            self._pipeline = self._built()
        starts, ends = [], []
        for _, (left, top, right, bottom), mirrored in parts:
            starts.append((top, right if mirrored else left))  # a part that ends before it starts is mirrored
            ends.append((bottom, left if mirrored else right))
        raws = [np.frombuffer(part.raw, np.uint8) for part in parts]
        try:
            (found,) = self._pipeline.run(
                raws=raws, starts=np.array(starts, np.float32), ends=np.array(ends, np.float32)
            )
        except RuntimeError:
            self._pipeline = None  # one that has failed cannot run again
            raise
        made_NHWC: Tensor = from_dlpack(found.as_tensor())
        return made_NHWC.permute(0, 3, 1, 2).contiguous()

    def _built(self) -> Any:
        dali = importlib.import_module("nvidia.dali")
        fn, types, gpu = dali.fn, dali.types, self._device.type == "cuda"
        pipeline = dali.Pipeline(
            batch_size=_AT_ONCE,
            num_threads=self._threads,
            device_id=(self._device.index or 0) if gpu else None,
            prefetch_queue_depth=1,  # the loader decides what is decoded ahead
        )
        with pipeline:
            raws, starts, ends = (fn.external_source(name=name, device="cpu") for name in ("raws", "starts", "ends"))
            pixels = fn.decoders.image(raws, device="mixed" if gpu else "cpu", output_type=types.RGB)
            size, how = [self._size, self._size], {"interp_type": types.INTERP_CUBIC, "antialias": True}
            pipeline.set_outputs(fn.resize(pixels, size=size, roi_start=starts, roi_end=ends, **how))
        try:
            pipeline.build()
        except RuntimeError as error:  # as where its decoders, a package of their own, are missing
            said = str(error).rpartition("encountered:")[2].strip().partition("\n")[0]
            raise UserError(
                f'data.decode = "dali" cannot start a pipeline ({said[:200]}); pip install nvidia-dali-cuda120 with '
                'all that it needs, or set data.decode = "cpu"'
            ) from error
        return pipeline
