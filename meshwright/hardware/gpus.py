"""The table of GPUs: find the one torch names, and its dense peak rates; a GPU not listed is unknown."""

import tomllib
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from meshwright.errors import UserError

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# Drivers keep some memory for themselves and ECC can be switched off; sizes of one part's variants differ by more.
_MEMORY_TOLERANCE = 0.1
# Older drivers print the same part without the maker's name, and V100s have been both "Tesla" and "NVIDIA".
_MAKERS = ("nvidia ", "tesla ", "amd ")


class Fact(BaseModel):
    """An entry of a file, with fixed fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Fact):
    """A link in and out of a GPU."""

    kind: Literal["nvlink", "nvlink-c2c", "pcie", "infinity-fabric"]
    """The technology."""
    generation: PositiveInt | None = None
    """Its generation, where it counts them."""
    bytes_per_s: PositiveFloat
    """Rate in one direction, all lanes together."""


class Gpu(Fact):
    """What is known of one GPU, per device as torch counts devices; None is unknown or absent, never a guess."""

    key: str
    """Its name in job files and calibration profiles."""
    names: tuple[str, ...]
    """Patterns of the device name torch prints."""
    short_names: tuple[str, ...] = ()
    """Other names of it in job files and for `--cluster`."""
    vague_names: tuple[str, ...] = ()
    """Patterns shared with other parts, used only if the memory size matches too."""
    memory_gib: PositiveFloat
    """Device memory."""
    memory_bandwidth_bytes_per_s: PositiveFloat | None = None
    """Device memory bandwidth."""
    peak: dict[Dtype, PositiveFloat]
    """Dense FLOP/s by dtype; a dtype that is absent is not supported or not published."""
    gpu_link: Link | None = None
    """To the other GPUs of the node, where it is part of the GPU and not an option."""
    host_link: Link | None = None
    """To the host's memory."""
    host_memory_gib: PositiveFloat | None = None
    """Host memory for each GPU, where it is soldered to the part."""
    board_watts: PositiveFloat | None = None
    """The most power that its board draws."""
    source: str
    """The source of the numbers."""


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table, in its order."""
    table = tomllib.loads(files("meshwright.hardware").joinpath("gpus.toml").read_text(encoding="utf-8"))
    return tuple(Gpu(key=key, **fields) for key, fields in table.items())


def gpu_by_key(key: str) -> Gpu:
    """The GPU with this key; a UserError that names the nearest keys when there is none."""
    by_key = {gpu.key: gpu for gpu in known_gpus()}
    if key in by_key:
        return by_key[key]
    plain = key.lower().replace("-", "")
    if called := [gpu for gpu in by_key.values() if plain in (gpu.key.replace("-", ""), *gpu.short_names)]:
        return called[0]  # rtx3090 is rtx-3090
    near = get_close_matches(key.lower(), by_key, n=3, cutoff=0.5) or list(by_key)
    raise UserError(f"the GPU {key!r} is not in the hardware table; use one of {', '.join(near)}, or leave it out")


def find_gpu(device_name: str, memory_bytes: int | None = None) -> Gpu | None:
    """The GPU a device name means, with its memory size to tell variants apart; None when unknown or ambiguous."""
    name = _plain(device_name)
    if "mig " in name:
        return None  # a slice of a GPU has a slice's rates
    named = [gpu for gpu in known_gpus() if _matches(name, gpu.names)]
    if not named and memory_bytes is not None:
        named = [gpu for gpu in known_gpus() if _matches(name, gpu.vague_names)]
    candidates = [gpu for gpu in named if _fits(gpu, memory_bytes)]
    return candidates[0] if len(candidates) == 1 else None


def mfu_peak_flops(gpu: Gpu, compute: str) -> float | None:
    """The dense peak that a compute format's MFU is measured against; None when it is not known.

    fp8's is bf16's: head and attention stay bf16, and with the same peak the gain shows in the MFU.
    """
    return peak_flops(gpu, "bf16" if compute == "fp8" else compute)


def peak_flops(gpu: Gpu, dtype: str) -> float | None:
    """Dense peak FLOP/s of a GPU in fp32, tf32, bf16, fp16 or fp8; None when it is not known."""
    return next((rate for known, rate in gpu.peak.items() if known == dtype), None)


def _plain(name: str) -> str:
    name = " ".join(name.lower().split())
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    return name


def _matches(plain_name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(plain_name, _plain(pattern)) for pattern in patterns)


def _fits(gpu: Gpu, memory_bytes: int | None) -> bool:
    if memory_bytes is None:
        return True
    return abs(memory_bytes / 2**30 - gpu.memory_gib) <= _MEMORY_TOLERANCE * gpu.memory_gib
