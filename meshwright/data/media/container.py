"""Film and sound files as FFmpeg opens them: documented formats only, no file but their own, bounded time."""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from meshwright.data.media.damage import NO_BYTES, TOO_SLOW, UNKNOWN, Damaged, decoding
from meshwright.data.raw.extras import need

FORMATS = "AAC, AVI, FLAC, MP3, MP4 (M4A, MOV), Matroska (WebM), Ogg (Opus) and WAV"
_OPTIONS = {
    # Other demuxers read lists of files (ffconcat, HLS), listen on a network (SDP) or run filters (lavfi).
    "format_whitelist": "aac,avi,flac,mp3,mov,matroska,ogg,wav",
    # No protocol has this name: what a file refers to is never opened.
    "protocol_whitelist": "none",
}
_FIRST_SECONDS = 20.0
_SECONDS_PER_MIB = 5.0
"""Of a processor: a film of 4K with few bits takes about two for each MiB."""


@contextmanager
def open_container(raw: bytes, kind: Literal["film", "sound"]) -> Iterator[Any]:
    """The container in bytes; inside, whatever FFmpeg raises is raised as `Damaged`."""
    if not raw:
        raise Damaged(NO_BYTES, "has no bytes")
    av = need("av", f"a {kind}" if kind == "film" else kind)
    with decoding():
        try:
            container = av.open(io.BytesIO(raw), options=dict(_OPTIONS), timeout=seconds_for(raw))
        except (av.error.InvalidDataError, av.error.ArgumentError):
            raise Damaged(UNKNOWN, f"is no {kind} in a known format; those are {FORMATS}") from None
        with container:
            yield container


def packets_of(container: Any, stream: Any, raw: bytes) -> Iterator[Any]:
    """The packets of a stream, `Damaged` once they have taken too much of a processor's time.

    Time of the processor and not of a clock: the same file then fails or passes on a busy machine as on an idle one.
    """
    limit_s, began = seconds_for(raw), time.thread_time()
    for packet in container.demux(stream):
        if time.thread_time() - began > limit_s:
            raise Damaged(TOO_SLOW, f"takes more than {limit_s:.0f} s to decode")
        yield packet


def frames_in(container: Any, stream: Any, raw: bytes) -> Iterator[Any]:
    """The decoded frames of a stream, within the same bound."""
    stream.thread_type = "NONE"  # the data workers are the threads, and only this one's time is counted
    for packet in packets_of(container, stream, raw):
        yield from packet.decode()


def seconds_for(raw: bytes) -> float:
    """The most that an item may take to be opened, and then to be decoded."""
    return _FIRST_SECONDS + _SECONDS_PER_MIB * len(raw) / (1 << 20)
