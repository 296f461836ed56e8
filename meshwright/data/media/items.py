"""Items out of bytes by the declared steps of their field, or by the user's own encoder."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import Damaged
from meshwright.data.media.encoder import load_encoder
from meshwright.data.media.film import frames_of
from meshwright.data.media.pictures import picture
from meshwright.data.media.sound import windows_of
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import MediaField


class ItemMaker:
    """Makes the items of a job."""

    def __init__(self, data: Data) -> None:
        self._fields: Sequence[tuple[str, MediaField]] = tuple(data.fields.items())
        self._own = None if data.encoder is None else getattr(load_encoder(data.encoder), "items", None)
        self.refuses = data.damaged == "refuse"
        """Whether an item that cannot be decoded is an error."""
        self.most_items = max(field.most_items for _, field in self._fields)
        """That one picture, film or sound becomes."""
        first = self._fields[0][1]
        raw = self._own is None and first.kind != "audio"
        self.scale: tuple[Sequence[float], Sequence[float]] | None = (first.mean, first.std) if raw else None
        """Mean and deviation of the colours, where items are whole numbers that are still to be normalised."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Pixels as bytes, until they are normalised; everything else as float32."""
        return np.dtype(np.float32 if self.scale is None else np.uint8)

    def make(self, number: int, raw: bytes, chance: Chance) -> NDArray[Any]:
        """The items of some bytes of a field."""
        name, field = self._fields[number]
        if self._own is not None:
            return _own_items(self._own, name, field, raw, chance)
        if field.kind == "image":
            return picture(raw, field, chance)[None]
        return frames_of(raw, field, chance) if field.kind == "video" else windows_of(raw, field)


def _own_items(own: Any, name: str, field: MediaField, raw: bytes, chance: Chance) -> NDArray[Any]:
    try:
        made = np.asarray(own(name, raw, chance), np.float32)
    except Damaged:
        raise
    except Exception as error:
        raise UserError(f"data.encoder: items fails for {name} ({type(error).__name__}: {error}); fix it") from error
    if made.shape[1:] != field.item_shape:
        raise UserError(f"data.encoder: items returns {made.shape} for {name}; return items × {field.item_shape}")
    return made
