"""Pictures, films and sounds: damaged real ones, other formats under their names, lists of files and of ports."""

import functools
import io
import random
import socket
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, Refused
from attacks.damage import damaged

SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm={kind} {port} RTP/AVP 0\n"
LISTS = [
    "ffconcat version 1.0\nfile secret.wav\n",
    "ffconcat version 1.0\nfile {folder}/secret.wav\n",
    "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.wav\n#EXT-X-ENDLIST\n",
    "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:{port}/a.wav\n#EXT-X-ENDLIST\n",
    '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period/></MPD>',
    SDP,
    "[playlist]\nFile1=secret.wav\n",
    "\x7fELF\x02\x01\x01",
    "%PDF-1.4\n",
    "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
]


@functools.cache
def whole() -> dict[str, bytes]:
    """A small real item of every kind, by name."""
    import av
    from PIL import Image

    made = {}
    for form in ("JPEG", "PNG", "WEBP", "BMP", "GIF"):
        stream = io.BytesIO()
        Image.radial_gradient("L").convert("RGB").resize((48, 32)).save(stream, form)
        made[f"image.{form}"] = stream.getvalue()
    made["audio.wav"] = _sound(4000)
    for form, codec in (("flac", "flac"), ("mp4", "aac"), ("matroska", "ffv1"), ("avi", "mjpeg"), ("mp4", "mpeg4")):
        stream = io.BytesIO()
        with av.open(stream, "w", format=form) as container:
            if codec in ("flac", "aac"):
                out = container.add_stream(codec, rate=8000)
                resampler = av.AudioResampler(
                    out.format.name, out.layout.name, 8000, out.codec_context.frame_size or None
                )
                with av.open(io.BytesIO(made["audio.wav"])) as source:
                    frames = [part for frame in source.decode(audio=0) for part in resampler.resample(frame)]
            else:
                out = container.add_stream(codec, rate=10)
                out.width = out.height = 32
                out.pix_fmt = {"ffv1": "bgr0", "mjpeg": "yuvj420p", "mpeg4": "yuv420p"}[codec]
                frames = [av.VideoFrame(32, 32, out.pix_fmt) for _ in range(6)]
            for frame in [*frames, None]:
                container.mux(out.encode(frame))
        made[f"{'audio' if codec in ('flac', 'aac') else 'video'}.{form}.{codec}"] = stream.getvalue()
    return made


def _sound(samples: int) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(random.Random(1).randbytes(2 * samples))
    return stream.getvalue()


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of items."""
    whole()
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"), memory_gib=3.0)


def _run(seed: str, folder: Path) -> None:
    from meshwright.data.media.chance import Chance
    from meshwright.data.media.damage import Damaged
    from meshwright.data.media.items import ItemMaker
    from meshwright.job.data import Data

    chance = random.Random(seed)
    (folder / "secret.wav").write_bytes(_sound(1234))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0)
        kind, raw = _item(chance, folder, server.getsockname()[1])
        sizes = {"rate": 8000, "seconds": 0.1, "windows": 50} if kind == "audio" else {"size": 16}
        field = {"kind": kind, "tokens": 1, "max_pixels": 1 << 20, **sizes}
        try:
            items = ItemMaker(Data(sources=("none",), fields={"item": field})).make(0, raw, Chance(3))
        except Damaged as error:
            raise Refused(f"{error.kind}: {error}") from error
        assert not raw.startswith((b"ffconcat", b"#EXTM3U", b"v=0", b"[playlist")), "a list of files was read"
        assert len(items) <= 50
        try:
            server.accept()
        except BlockingIOError:
            return
        raise AssertionError("an item opened a connection")


def _item(chance: random.Random, folder: Path, port: int) -> tuple[str, bytes]:
    if chance.random() < 0.25:
        kind = chance.choice(["audio", "video", "image"])
        text = chance.choice(LISTS).replace("{folder}", str(folder)).replace("{port}", str(port))
        return kind, text.replace("{kind}", kind).encode("latin-1") + chance.choice(
            [b"", bytes(99), whole()["audio.wav"]]
        )
    name = chance.choice(list(whole()))
    kind, raw = name.partition(".")[0], whole()[name]
    if chance.random() < 0.1:
        kind = chance.choice(["audio", "video", "image"])
    return kind, damaged(raw, chance) if chance.random() < 0.9 else raw


MEDIA_FILES = Family("pictures, film and sound", draw, weight=0.5)
