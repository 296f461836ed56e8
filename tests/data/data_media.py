"""Pictures, sounds and films for tests, and tars of them."""

import io
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

T = 4
"""Tokens of an item."""
IMAGE = {"kind": "image", "size": 16, "tokens": T}


def picture(number: int, form: str = "JPEG", width: int = 48, height: int = 32) -> bytes:
    """A picture of one colour, which tells its number."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour(number)).save(stream, form)
    return stream.getvalue()


def colour(number: int) -> tuple[int, int, int]:
    return (number * 37 % 256, number * 91 % 256, number * 53 % 256)


def noise(number: int, side: int = 64) -> bytes:
    """A JPEG with something in every corner."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3)).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(stream, "JPEG")
    return stream.getvalue()


def tone(hertz: float, seconds: float = 1.0, rate: int = 8000) -> bytes:
    """A WAV file of one tone."""
    import wave

    samples = (np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate) * 20000).astype("<i2")
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return stream.getvalue()


def film(numbers: Iterable[int], side: int = 32) -> bytes:
    """A film, each frame of which has the colour of its number."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as container:
        video = container.add_stream("ffv1", rate=10)
        video.width = video.height = side
        video.pix_fmt = "bgr0"
        for number in numbers:
            pixels = np.full((side, side, 3), colour(number), np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
    return stream.getvalue()


def write_tar(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> str:
    """A WebDataset shard: for each sample its key and its members by ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, members in samples:
            for ending, raw in members.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
    return str(path)


def captioned(numbers: Iterable[int], make=picture) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of a picture and its caption."""
    return [(f"{n:06}", {"jpg": make(n), "txt": f"this is the picture {n}".encode()}) for n in numbers]


def huge_png(width: int, height: int) -> bytes:
    """A small file that claims to be a large picture, all of it black: it would unpack to width × height pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    packed = zlib.compressobj(1)
    rows = height if height < 20_000 else 10  # nobody should get so far
    body = b"".join(packed.compress(bytes(width + 1)) for _ in range(rows)) + packed.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
