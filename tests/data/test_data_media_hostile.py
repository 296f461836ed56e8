"""Films and sounds made to do harm: formats that open other files or ports, large frames, endless work."""

import io
import wave
from itertools import count

import pytest
from data_media import film, picture, tone

from meshwright.data.media import container
from meshwright.data.media.chance import Chance
from meshwright.data.media.damage import DAMAGED, TOO_SLOW, UNKNOWN, Damaged
from meshwright.data.media.film import check_film, frames_of
from meshwright.data.media.pictures import check_picture
from meshwright.data.media.sound import count_windows, windows_of
from meshwright.job.fields import MediaField

SOUND = MediaField(kind="audio", tokens=1, rate=8000, seconds=1.0)
FILM = MediaField(kind="video", size=16, tokens=1, frames=2)
SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 41234 RTP/AVP 0\na=rtpmap:0 PCMU/8000\n"
LISTS = {
    "ffconcat": b"ffconcat version 1.0\nfile private.wav\n",
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nprivate.wav\n#EXT-X-ENDLIST\n",
    "sdp": SDP,
    "ass": b"[Script Info]\nScriptType: v4.00+\n[Events]\n",
    "y4m": b"YUV4MPEG2 W16 H16 F25:1 Ip A0:0 C420jpeg\nFRAME\n" + bytes(384),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    ("check", "kind"), [(count_windows, SOUND), (lambda raw, field: check_film(raw, field, True), FILM)]
)
def test_other_formats_are_not_opened(tmp_path, monkeypatch, name, check, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.wav").write_bytes(tone(440))
    with pytest.raises(Damaged, match="in a known format; those are AAC, AVI, FLAC") as caught:
        check(LISTS[name], kind)
    assert caught.value.kind == UNKNOWN


@pytest.mark.parametrize("form", ["TIFF", "ICO", "PPM", "PDF", "EPS"])
def test_pictures_of_other_formats_are_not_opened(form):
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, form)
    with pytest.raises(Damaged) as caught:
        check_picture(stream.getvalue(), MediaField(kind="image", size=16, tokens=1), True)
    assert caught.value.kind == UNKNOWN


ENCODERS = {
    "wav": "pcm_s16le",
    "avi": "pcm_s16le",
    "flac": "flac",
    "mp4": "aac",
    "adts": "aac",
    "matroska": "aac",
    "ogg": "libopus",
    "mp3": "libmp3lame",
}


@pytest.mark.parametrize("form", ENCODERS)
def test_documented_formats_are_read(form):
    av, codec = pytest.importorskip("av"), ENCODERS[form]
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as made, av.open(io.BytesIO(tone(440, rate=48000))) as source:
        out = made.add_stream(codec, rate=48000)
        resampler = av.AudioResampler(out.format.name, out.layout.name, out.rate, out.codec_context.frame_size or None)
        for frame in source.decode(audio=0):
            for part in resampler.resample(frame):
                made.mux(out.encode(part))
        made.mux(out.encode())
    assert count_windows(stream.getvalue(), SOUND.model_copy(update={"windows": 4})) in (1, 2)  # MP3 pads it


@pytest.mark.parametrize(
    "decode", [lambda: windows_of(tone(440), SOUND), lambda: frames_of(film(range(4)), FILM, Chance(None))]
)
def test_an_item_takes_bounded_time(monkeypatch, decode):
    decode()
    clock = count(0, 15)
    monkeypatch.setattr(container.time, "thread_time", lambda: float(next(clock)))
    with pytest.raises(Damaged, match="takes more than 20 s to decode") as caught:
        decode()
    assert caught.value.kind == TOO_SLOW


def test_a_frame_larger_than_the_header_says_is_not_decoded():
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as made:
        out = made.add_stream("mjpeg", rate=10)
        out.width = out.height = 32
        out.pix_fmt = "yuvj420p"
        for number, side in enumerate((32, 32, 512)):
            packet = av.Packet(picture(number, width=side, height=side))
            packet.stream, packet.pts, packet.dts = out, number, number
            made.mux(packet)
    decoded = []
    for most in (32 * 32, 512 * 512):
        field = MediaField(kind="video", size=16, tokens=1, frames=3, max_pixels=most)
        try:
            decoded.append(frames_of(stream.getvalue(), field, Chance(None)).shape[0])
        except Damaged as error:
            decoded.append(error.kind)
    assert decoded == [DAMAGED, 3]


def test_a_sound_of_next_to_no_rate_is_not_resampled():
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1)
        file.writeframes(bytes(8192))
    with pytest.raises(Damaged, match="has 1 samples a second, fewer than 1000") as caught:
        windows_of(stream.getvalue(), SOUND)
    assert caught.value.kind == DAMAGED
