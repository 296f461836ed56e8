"""The device of a run, and what it supports."""

import hashlib
import os
import platform
import shutil
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.data.cache import cache_root
from meshwright.errors import UserError
from meshwright.hardware import Gpu, find_gpu, mfu_peak_flops
from meshwright.job import Job
from meshwright.layout import THE_CPU, Device
from meshwright.model.numbers import DTYPES
from meshwright.torch_private.arithmetic import cpu_multiplies
from meshwright.torch_private.compiler import given_cache

NEEDS_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""The NVIDIA compute capability that first supports a format in hardware: Ampere, and Ada for fp8."""
_TRITON_CAPABILITY = (7, 0)


def choose_device(job: Job) -> torch.device:
    """The device that `run.device` names; rejects one that is missing or does not support the job's format."""
    name = job.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise UserError(f'run.device = "{job.run.device}" is not a device; use auto, cpu, cuda or cuda:N')
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            have = f"this machine has {count} CUDA device{'s' if count != 1 else ''}"
            raise UserError(
                f'run.device = "{job.run.device}" is not available ({have}); use run.device = "auto" or "cpu"'
            )
    device = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _require_format(job.precision.format, device)
    if job.precision.format == "fp8" and job.precision.fp8_scales == "block" and device.type == "cuda":
        _require_blocks(device)
    return device


def _require_format(compute: str, device: torch.device) -> None:
    """Reject a format the device does not support."""
    if device.type == "cpu":
        if compute == "tf32":
            raise UserError('precision.compute = "tf32" is only for GPUs, but run.device is the CPU; set "fp32"')
        return
    capability, needed = torch.cuda.get_device_capability(device), NEEDS_CAPABILITY.get(compute, (0, 0))
    if torch.version.hip is None and capability < needed:
        raise UserError(
            f'precision.compute = "{compute}" needs compute capability {needed[0]}.{needed[1]}, but '
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; set it to "
            f'"{"bf16" if capability >= NEEDS_CAPABILITY["bf16"] else "fp16"}"'
        )


def _require_blocks(device: torch.device) -> None:
    """Reject scales of blocks where cuBLAS has no product for them: it has on Hopper, from CUDA 12.9 on."""
    major, minor = torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if major != 9 or cuda < (12, 9):
        software = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise UserError(
            'precision.fp8_scales = "block" needs compute capability 9.0 and CUDA 12.9, but '
            f"{torch.cuda.get_device_name(device)} has {major}.{minor} and this torch {software}; set it to "
            '"row" or "tensor"'
        )


def prepare_device(job: Job, device: torch.device) -> None:
    """Process-wide settings: TF32 for fp32 products, determinism if requested, and a cache for compiled code."""
    torch.manual_seed(job.run.seed)
    # A thread settles its number of compute threads when it first asks; until this one has, the 1 that the loader's
    # page-locking thread sets for itself would be taken for all, and offloaded updates would run on one core.
    torch.get_num_threads()
    if job.run.compiles:
        _keep_compiled_code(job)
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # emulated_format reports it
    if job.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at initialization
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if job.precision.format == "fp32" else "high")


def _keep_compiled_code(job: Job) -> None:
    """Keep compiled code in a folder that later cluster jobs find too, and only on CPUs of this kind.

    Torch's default is a temporary folder, and torch takes what a CPU with longer vectors compiled for its own: in 2.13
    code for AVX-512, compiled again for AVX2, computed NaN without an error.
    """
    given = given_cache()
    folder, kind = Path(given) if given else cache_root(job.data.cache) / "compiled", _kind_of_cpu()
    if folder.name != kind:  # it is the same where the process that started this one has chosen it
        folder /= kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        field = "TORCHINDUCTOR_CACHE_DIR" if given else "data.cache"
        raise UserError(
            f"{folder} cannot be made for compiled code ({error.strerror}); let {field} name a folder that can be "
            "written, or set run.compile = false"
        ) from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _kind_of_cpu() -> str:
    """A short hash of this CPU's architecture and instructions, as far as Linux tells them."""
    kind = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:  # of the first core
        kind += next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return hashlib.sha256(" ".join(kind).encode()).hexdigest()[:12]


def capabilities(device: torch.device) -> Device:
    """What `auto` of a job's fields depends on."""
    if device.type == "cpu":
        return THE_CPU
    capability = torch.cuda.get_device_capability(device)
    has_bf16 = torch.version.hip is not None or capability >= NEEDS_CAPABILITY["bf16"]
    return Device(torch.cuda.get_device_name(device), has_bf16, _why_not_compiled(capability))


def capabilities_here(job: Job) -> Device:
    """Those of the device that a job would run on, without memory of it and without refusals."""
    gpu = job.run.device != "cpu" and torch.cuda.device_count() > 0
    return capabilities(torch.device("cuda" if gpu else "cpu"))


def _why_not_compiled(capability: tuple[int, int]) -> str | None:
    """What the compiler lacks on this machine for a GPU; None if nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is None and capability < _TRITON_CAPABILITY:
        return f"triton needs compute capability {_TRITON_CAPABILITY[0]}.{_TRITON_CAPABILITY[1]}"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
        return "triton needs a C compiler, and there is none here"
    return None


def emulated_format(job: Job, device: torch.device) -> str | None:
    """The job's compute format if it runs on a CPU that lacks it and is many times slower."""
    compute = job.precision.format
    if device.type == "cuda" or DTYPES[compute] == torch.float32:
        return None
    return None if compute != "fp8" and cpu_multiplies(DTYPES[compute]) else compute


def gpu_of(device: torch.device) -> Gpu | None:
    """The known GPU model of a device, or None for a CPU or unknown hardware."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory)


def device_peak_flops(job: Job, device: torch.device) -> float | None:
    """The dense peak FLOP/s of the job's format on this device; None if unknown, so that no MFU is printed."""
    gpu = gpu_of(device)
    return None if gpu is None else mfu_peak_flops(gpu, job.precision.format)


def device_name(device: torch.device) -> str:
    """A readable name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
