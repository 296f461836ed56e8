"""Film out of bytes: frames at equal distances, each cut and resized as soon as it is decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshwright.data.media.chance import Chance
from meshwright.data.media.container import frames_in, open_container, packets_of
from meshwright.data.media.damage import DAMAGED, TOO_LARGE, UNKNOWN, Damaged
from meshwright.data.media.pictures import Pixels, resized
from meshwright.job.fields import MediaField


def check_film(raw: bytes, field: MediaField, decode: bool) -> None:
    """Raise `Damaged` unless this is a film of an allowed size whose sampled frames, if asked for, can be decoded."""
    with opened(raw, field) as (container, stream):
        if decode:
            for _ in sampled(container, stream, raw, field.frames):
                pass


def frames_of(raw: bytes, field: MediaField, chance: Chance) -> Pixels:
    """Frames of a film as items: frames × 3 × size × size; the same part of every frame is kept."""
    assert field.size is not None
    items = np.empty((field.frames, 3, field.size, field.size), np.uint8)
    with opened(raw, field) as (container, stream):
        key = chance.draw_key()
        for number, frame in enumerate(sampled(container, stream, raw, field.frames)):
            items[number] = resized(frame.to_image(), field, Chance(key))
    return items


def sampled_numbers(count: int, wanted: int) -> list[int]:
    """Which of a film's frames are taken: the middle of each of so many equal parts."""
    return [(2 * part + 1) * count // (2 * wanted) for part in range(wanted)]


def sampled(container: Any, stream: Any, raw: bytes, wanted: int) -> Iterator[Any]:
    """The frames taken of an opened film, repeated where it has too few."""
    numbers = sampled_numbers(stream.frames or _counted(raw), wanted)
    place, last = 0, None
    for frame_number, frame in enumerate(frames_in(container, stream, raw)):
        last = frame
        while place < wanted and numbers[place] <= frame_number:
            yield frame
            place += 1
        if place == wanted:
            return
    if last is None:
        raise Damaged(DAMAGED, "holds no frame that can be decoded")
    if place < wanted - 1:
        raise Damaged(DAMAGED, f"ends before its frame {numbers[place]}")
    yield last  # the header counts one more than there are


@contextmanager
def opened(raw: bytes, field: MediaField) -> Iterator[tuple[Any, Any]]:
    """The film in bytes and its first stream of pictures."""
    with open_container(raw, "film") as container:
        if not container.streams.video:
            raise Damaged(UNKNOWN, "holds no pictures")
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > field.max_pixels:
            raise Damaged(TOO_LARGE, f"has {width} × {height} pixels, more than max_pixels = {field.max_pixels}")
        # A frame may be larger than the header says.
        stream.codec_context.options = {"max_pixels": str(field.max_pixels)}
        yield container, stream


def _counted(raw: bytes) -> int:
    """Frames of a film whose header does not say: one for each packet."""
    with open_container(raw, "film") as container:
        packets = packets_of(container, container.streams.video[0], raw)
        return sum(1 for packet in packets if packet.size) or 1
