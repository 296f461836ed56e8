"""Sound out of bytes: resampled, cut into windows, each as log-mel features in the form that Whisper takes."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data.media.container import frames_in, open_container
from meshwright.data.media.damage import DAMAGED, UNKNOWN, Damaged
from meshwright.data.raw.extras import need
from meshwright.job.fields import MediaField

Floats = NDArray[np.float32]
_LOWEST_RATE = 1000
"""Samples a second, which no sound has less of: a header of 1 would make sixteen thousand of each one."""


def count_windows(raw: bytes, field: MediaField) -> int:
    """Windows that a sound fills, decoded to its end or to the last window for that."""
    samples = sum(map(len, _decoded(raw, field)))
    if samples == 0:
        raise Damaged(DAMAGED, "holds no sound")
    return min(field.windows, max(1, -(-samples // _window_samples(field))))


def windows_of(raw: bytes, field: MediaField) -> Floats:
    """The windows of a sound: windows × mels × frames."""
    length = _window_samples(field)
    wave = np.concatenate([np.empty(0, np.float32), *_decoded(raw, field)])[: field.windows * length]
    if len(wave) == 0:
        raise Damaged(DAMAGED, "holds no sound")
    return wave_windows(wave, length, field.rate, field.mels)


def wave_windows(wave: Floats, length: int, rate: int, mels: int) -> Floats:
    """A wave in windows of so many samples, each as log-mel features; the last is filled up with silence."""
    count = max(1, -(-len(wave) // length))
    wave = np.pad(wave, (0, count * length - len(wave)))
    return log_mel(torch.from_numpy(wave).view(count, length), rate, mels).numpy()


def log_mel(waves_NL: torch.Tensor, rate: int, mels: int) -> torch.Tensor:
    """Log-mel features of waves: a frame every hundredth of a second, each of a fortieth, scaled as Whisper does."""
    window, hop = rate // 40, rate // 100
    spectrum = torch.stft(
        waves_NL, window, hop, window=torch.hann_window(window), return_complex=True, center=True, pad_mode="reflect"
    )
    power = spectrum[..., :-1].abs() ** 2
    loud = torch.clamp(_mel_filters(rate, window, mels) @ power, min=1e-10).log10()
    loud = torch.maximum(loud, loud.amax((-2, -1), keepdim=True) - 8.0)
    return (loud + 4.0) / 4.0


def _window_samples(field: MediaField) -> int:
    return round(field.seconds * 100) * (field.rate // 100)


def _decoded(raw: bytes, field: MediaField) -> Iterator[Floats]:
    """The sound as one channel at the field's rate, a little at a time, up to what its windows hold."""
    most = field.windows * _window_samples(field)
    with open_container(raw, "sound") as container:
        if not container.streams.audio:
            raise Damaged(UNKNOWN, "holds no sound")
        resampler = need("av", "sound").AudioResampler(format="flt", layout="mono", rate=field.rate)
        for frame in _resampled(frames_in(container, container.streams.audio[0], raw), resampler):
            part = frame.to_ndarray()[0]
            yield part[:most]
            most -= len(part)
            if most <= 0:
                return


def _resampled(frames: Iterator[Any], resampler: Any) -> Iterator[Any]:
    for frame in frames:
        if frame.sample_rate < _LOWEST_RATE:
            raise Damaged(DAMAGED, f"has {frame.sample_rate} samples a second, fewer than {_LOWEST_RATE}")
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


@lru_cache(maxsize=8)
def _mel_filters(rate: int, window: int, mels: int) -> torch.Tensor:
    """Triangles on Slaney's mel scale, each of area one: mels × frequencies."""
    frequencies = np.linspace(0, rate / 2, window // 2 + 1)
    edges = _from_mel(np.linspace(_to_mel(np.array(0.0)), _to_mel(np.array(rate / 2)), mels + 2))
    slopes = edges[:, None] - frequencies[None]
    widths = np.diff(edges)
    up, down = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(up, down)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(triangles.astype(np.float32))


_LINEAR_HZ, _LOG_FROM = 200.0 / 3, 1000.0
_STEP = np.log(6.4) / 27.0


def _to_mel(hertz: Any) -> Any:
    log = 15.0 + np.log(np.maximum(hertz, 1e-9) / _LOG_FROM) / _STEP
    return np.where(hertz < _LOG_FROM, hertz / _LINEAR_HZ, log)


def _from_mel(mel: Any) -> Any:
    return np.where(mel < 15.0, mel * _LINEAR_HZ, _LOG_FROM * np.exp((mel - 15.0) * _STEP))
