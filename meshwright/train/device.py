"""The device of a run, and what it can do."""

import os
import resource
import sys
import warnings

import torch

from meshwright.errors import UserError
from meshwright.hardware import Gpu, find_gpu, peak_flops
from meshwright.job import Job


def choose_device(job: Job) -> torch.device:
    """The device `run.device` names; one that is not there, or cannot compute in the job's format, is refused."""
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
            raise UserError(f'run.device = "{job.run.device}" is not there ({have}); use run.device = "auto" or "cpu"')
    device = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if job.precision.compute == "bf16" and not torch.cuda.is_bf16_supported():
            raise UserError(
                f'precision.compute = "bf16" is not supported by {torch.cuda.get_device_name(device)}; set it to "fp32"'
            )
    return device


def prepare_device(job: Job, device: torch.device) -> None:
    """Process-wide settings of a run: TF32 for fp32 matrix products on a GPU, and determinism where asked for."""
    torch.manual_seed(job.run.seed)
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # emulates_bf16 says it in plain words
    if job.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it first starts
        torch.use_deterministic_algorithms(True)
    elif device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def emulates_bf16(job: Job, device: torch.device) -> bool:
    """Whether the job computes in bf16 on a CPU that has no such arithmetic and takes hundreds of times longer."""
    return job.precision.compute == "bf16" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def gpu_of(device: torch.device) -> Gpu | None:
    """The known GPU behind a device, or None for a CPU or unknown hardware."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory)


def device_peak_flops(job: Job, device: torch.device) -> float | None:
    """The dense peak of the job's arithmetic on this device; None where it is not known, so that no MFU is printed."""
    gpu = gpu_of(device)
    if gpu is None:
        return None
    compute = "tf32" if job.precision.compute == "fp32" and not job.run.deterministic else job.precision.compute
    return peak_flops(gpu, compute)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
