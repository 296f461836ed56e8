"""Pictures out of bytes: refused by their header where they are too large, decoded, turned upright, cut and brought to
one size."""

import io
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import DAMAGED, NO_BYTES, TOO_LARGE, UNKNOWN, Damaged, decoding
from meshwright.data.raw.extras import need
from meshwright.job.fields import MediaField

Pixels = NDArray[np.uint8]
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_ORIENTATION = 0x0112
"""EXIF's tag that says how a camera was held."""
_TURNS = {2: (0, True), 3: (2, False), 4: (2, True), 5: (3, True), 6: (3, False), 7: (1, True), 8: (1, False)}
"""By its value: quarter turns against the clock, and whether left and right are then exchanged."""
_DEEP = ("I", "I;16", "I;16B")
"""Grey of 16 bits, as versions of Pillow name it."""
_SMALLEST_AREA, _WIDEST = 0.35, 4 / 3
"""Of a random crop: its least share of the picture, and the most that its sides differ by."""


@dataclass(frozen=True)
class Cut:
    """Which part of a picture is kept, as shares of its width and height, and whether it is mirrored."""

    left: float
    top: float
    right: float
    bottom: float
    mirrored: bool

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The part in pixels."""
        return self.left * width, self.top * height, self.right * width, self.bottom * height


def cut_of(field: MediaField, width: int, height: int, chance: Chance) -> Cut:
    """The part of a picture that a field's crop keeps."""
    mirrored = field.flip and chance.there and chance.draw() < 0.5
    if field.crop == "squash":
        return Cut(0.0, 0.0, 1.0, 1.0, mirrored)
    if field.crop == "random" and chance.there:
        area = chance.draw(_SMALLEST_AREA, 1.0) * width * height
        ratio = math.exp(chance.draw(-math.log(_WIDEST), math.log(_WIDEST)))
        wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    else:
        wide = high = min(width, height)
    left, top = chance.draw(0, width - wide), chance.draw(0, height - high)
    if field.crop == "center":
        left, top = (width - wide) / 2, (height - high) / 2
    # Whole pixels, so that every decoder keeps the same ones.
    left, top, wide, high = int(left), int(top), max(1, int(wide)), max(1, int(high))
    return Cut(left / width, top / height, (left + wide) / width, (top + high) / height, mirrored)


def check_picture(raw: bytes, field: MediaField, decode: bool) -> None:
    """Raise `Damaged` unless this is a picture of an allowed size whose bytes, if they are to be decoded, are whole."""
    with decoding():
        image = open_picture(raw, field)
        if decode:
            image.draft("RGB", (1, 1))  # a JPEG's data is read to its end, and only a fraction of it computed
            image.load()


def picture(raw: bytes, field: MediaField, chance: Chance) -> Pixels:
    """A picture as an item: 3 × size × size, cut and resized by the field's settings."""
    with decoding():
        image = open_picture(raw, field)
        return resized(image, field, chance)


def open_picture(raw: bytes, field: MediaField) -> Any:
    """The picture in bytes, of which only the header was read."""
    if not raw:
        raise Damaged(NO_BYTES, "has no bytes")
    pillow = need("PIL.Image", "a picture")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large pictures, which are refused below
        try:
            image = pillow.open(io.BytesIO(raw), formats=_FORMATS)
        except pillow.UnidentifiedImageError:
            raise Damaged(UNKNOWN, f"is none of {', '.join(_FORMATS)}") from None
        except pillow.DecompressionBombError:
            most = 2 * pillow.MAX_IMAGE_PIXELS
            raise Damaged(TOO_LARGE, f"has more than {most:,} pixels, the most that Pillow opens") from None
    width, height = image.size
    if width * height > field.max_pixels:
        raise Damaged(TOO_LARGE, f"has {width} × {height} pixels, more than max_pixels = {field.max_pixels}")
    if width * height == 0:
        raise Damaged(DAMAGED, "has no pixels")
    return image


def turn_of(image: Any) -> tuple[int, bool]:
    """Quarter turns against the clock that make an opened picture upright, and whether it is mirrored after them."""
    try:
        value = image.getexif().get(_ORIENTATION)
    except Exception:  # of a camera's notes alone: the picture itself may be whole
        value = None
    return _TURNS.get(value, (0, False)) if isinstance(value, int) else (0, False)


def upright_size(image: Any) -> tuple[int, int]:
    """Width and height of an opened picture as it is to be seen."""
    width, height = image.size
    return (height, width) if turn_of(image)[0] % 2 else (width, height)


def resized(image: Any, field: MediaField, chance: Chance) -> Pixels:
    """An opened picture as an item."""
    from PIL import Image

    assert field.size is not None
    (quarters, mirrored), size = turn_of(image), field.size
    cut = cut_of(field, *upright_size(image), chance)
    # A JPEG can be decoded at a half, a quarter or an eighth; that suffices while the part kept has enough pixels.
    enough = math.ceil(size / (cut.right - cut.left)), math.ceil(size / (cut.bottom - cut.top))
    image.draft("RGB", enough[::-1] if quarters % 2 else enough)
    image = _colours(image)
    if quarters:
        image = image.transpose(
            (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)[quarters - 1]
        )
    if mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=cut.box(*image.size), reducing_gap=2.0)
    pixels = np.asarray(image)
    return np.ascontiguousarray((pixels[:, ::-1] if cut.mirrored else pixels).transpose(2, 0, 1))


def _colours(image: Any) -> Any:
    """An opened picture in red, green and blue."""
    from PIL import Image

    if image.mode in _DEEP:  # Pillow would cut them off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
