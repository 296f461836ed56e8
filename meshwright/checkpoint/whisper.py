"""The encoder of a Whisper folder as the start of [model.audio]; only safetensors are opened."""

from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.hf_read import parameter_sizes, stored_fingerprint, stored_tensors
from meshwright.checkpoint.tensorfile import read_window
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.job.encoder import encoder_part
from meshwright.model.audio import sinusoids
from meshwright.model.hf_whisper import POSITIONS, PREFIXES, whisper_tensor

FORMATS = ("F32", "BF16", "F16")
"""Those that fp32 represents exactly."""
_ROUNDED = 1e-2
"""By how much positions in fewer bits may differ from those that are computed."""


class WhisperEncoder:
    """A folder's encoder under our names; opening it reads only headers."""

    def __init__(self, folder: Path, shape: Model) -> None:
        stored = stored_tensors(folder)
        prefix = next((one for one in PREFIXES if f"{one}conv1.weight" in stored), None)
        self._field = f'model.audio.init_from = "{folder}"'
        if prefix is None:
            raise UserError(f"{self._field} has no encoder of Whisper; give the folder of a Whisper model")
        self._shape = shape
        self._stored = {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}

    def rows(self, name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        """Some rows of our parameter `name`, whose full size is `size`, as they are stored."""
        theirs = whisper_tensor(name.removeprefix("audio."))
        if theirs not in self._stored:
            raise UserError(f"{self._field} lacks {theirs}; give the folder of a complete model")
        stored = self._stored[theirs]
        if stored.size != size:
            raise UserError(f"{self._field}: {theirs} has shape {stored.size}, but {name} has {size}; leave sizes out")
        if stored.dtype not in FORMATS:
            raise UserError(f"{self._field}: {theirs} is stored as {stored.dtype}; use weights in {', '.join(FORMATS)}")
        return read_window(stored.path, stored.name, itemgetter(rows))

    def require(self) -> None:
        """Refuse by name a tensor that is missing or of another size or format, and positions that are no sinusoids."""
        for name, size in parameter_sizes(self._shape).items():
            if name.startswith("audio.") and encoder_part(name) == "encoder":
                self.rows(name, size, slice(0, 1))
        if POSITIONS not in self._stored or (audio := self._shape.audio) is None:
            return
        expected = sinusoids(audio.tokens, audio.width, torch.device("cpu"))
        positions = self._stored[POSITIONS]
        if positions.size == expected.shape and positions.dtype in FORMATS:
            found = read_window(positions.path, positions.name, itemgetter(slice(None))).double()
            if (found - expected).abs().max() <= _ROUNDED:
                return
        raise UserError(f"{self._field}: {POSITIONS} are no sinusoids; use a model with Whisper's positions")

    def fingerprint(self) -> str:
        """A hash that tells this encoder from others without reading all of it."""
        return stored_fingerprint(self._stored, lambda name, take: read_window(*self._where(name), take))

    def _where(self, name: str) -> tuple[Path, str]:
        return self._stored[name].path, self._stored[name].name
