"""Which of torch's attention kernels a run uses on a GPU: the fastest that supports the job's shapes, measured at the
start, and recorded so that a resumed run uses the same one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from meshwright.job import Job
from meshwright.model import attend
from meshwright.model.numbers import DTYPES
from meshwright.parallel import World, steps_until_captured
from meshwright.torch_private.arithmetic import sleep_on_gpu

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
REPEATS = 3
LAUNCH_CYCLES = 20_000_000
"""Cycles of a GPU in which the host launches all kernels of one attention: 10 ms at 2 GHz."""
BOUND = 0.02
"""How far gradients of two kernels may be apart, relative to their norm; bf16 rounds each number by up to 0.4%."""
FLASH_4 = "flash-4"
"""FlashAttention-4, if its package is installed: torch then calls it in place of its own flash kernel."""


def choose_attention(job: Job, world: World, remembered: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Make plain causal attention use the fastest kernel; returns the choice and how long each took.

    Rank 0's choice from an earlier attempt is used again instead.
    None if there is nothing to choose: on a CPU, in fp32, and with masks that only one kernel supports.
    """
    if world.device.type != "cuda" or job.precision.number_bytes != 2 or job.data.mask_documents:
        return None
    if current_flash_attention_impl() is not None:  # of an earlier job in this process
        restore_flash_attention_impl()
    if remembered is not None and remembered["kernel"] == FLASH_4 and not _has_flash_4():
        remembered = None
    captured = steps_until_captured(job, world) > 0
    chosen = _agreed(remembered or _measured(job, world.device, captured) if world.rank == 0 else None, world)
    kernel, groups = chosen["kernel"], chosen["groups"]
    torch.backends.cuda.enable_cudnn_sdp(kernel not in ("flash", FLASH_4))
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
    if kernel == FLASH_4:
        activate_flash_attention_impl("FA4")
    attend.EXPAND_GROUPS = groups == "expanded"
    return chosen


def _has_flash_4() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def _kernels(job: Job) -> list[str]:
    """The kernels that may be measured for a job. FlashAttention-4 replaces torch's flash kernel everywhere, so it is
    tried only where plain causal attention is all that a job computes: it has no backward of windows in torch 2.11."""
    plain = job.layout.cp == 1 and job.model.sliding_window is None and not job.model.sinks
    return [*BACKENDS, FLASH_4] if plain and _has_flash_4() else list(BACKENDS)


@contextmanager
def _flash_of(kernel: str) -> Iterator[None]:
    if kernel != FLASH_4:
        yield
        return
    activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _agreed(found: dict[str, Any] | None, world: World) -> dict[str, Any]:
    """Rank 0's choice on all ranks: another kernel rounds differently."""
    report = [found]
    if world.size > 1:
        dist.broadcast_object_list(report, src=0)
    assert report[0] is not None
    return report[0]


def _measured(job: Job, device: torch.device, captured: bool) -> dict[str, Any]:
    shape, layout = job.model, job.layout
    heads, kv_heads = shape.heads // layout.tp, max(1, shape.kv_heads // layout.tp)
    sizes = (job.batch.micro_batch, job.batch.sequence_length, shape.head_dim)
    inputs = _drawn(*sizes, heads, kv_heads, DTYPES[job.precision.format], device)
    milliseconds: dict[str, float] = {}
    refused = {}
    gradients: list[Tensor] = []
    for kernel in _kernels(job):
        for groups in ("native", "expanded") if heads != kv_heads else ("native",):
            taken = _time(kernel, inputs, groups == "expanded", captured)
            if taken is None:
                continue
            if kernel != FLASH_4:  # which is no part of torch, and released as a beta
                gradients = gradients or [tensor.grad.clone() for tensor in inputs[:3] if tensor.grad is not None]
            elif gradients and (apart := _apart(inputs, gradients)) > BOUND:
                refused[f"{kernel}, {groups}"] = f"its gradients are {apart:.1%} apart from torch's"
                continue
            milliseconds[f"{kernel}, {groups}"] = round(taken, 3)
    fastest = min(milliseconds, key=lambda name: milliseconds[name], default="torch's choice, native")
    kernel, groups = fastest.split(", ")
    found = {"kernel": kernel, "groups": groups, "milliseconds": milliseconds}
    return found | ({"refused": refused} if refused else {})


def _drawn(
    batch: int, sequence: int, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""

    def drawn(count: int) -> Tensor:
        made = torch.randn(batch, sequence, count, head_dim, dtype=dtype, device=device)
        return made.transpose(1, 2).requires_grad_()

    return [drawn(heads), drawn(kv_heads), drawn(kv_heads), drawn(heads).detach()]


def _apart(inputs: list[Tensor], gradients: list[Tensor]) -> float:
    """The largest relative distance between the gradients of the last run and others."""
    pairs = zip([tensor.grad for tensor in inputs[:3]], gradients, strict=True)
    return max(
        float((own.float() - other.float()).norm() / other.float().norm()) for own, other in pairs if own is not None
    )


def _time(kernel: str, inputs: list[Tensor], expanded: bool, captured: bool) -> float | None:
    """Milliseconds of one forward and backward, whose gradients are kept; None if the kernel does not support it.

    As the job will run them: in a CUDA graph the GPU's own time, else with that of launching, if that takes longer.
    """
    q, k, v, grad = inputs
    heads, times = q.shape[1], []
    try:
        with _flash_of(kernel), sdpa_kernel(BACKENDS.get(kernel, SDPBackend.FLASH_ATTENTION)):
            for _ in range(REPEATS + 1):
                q.grad = k.grad = v.grad = None
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                if captured:
                    sleep_on_gpu(LAUNCH_CYCLES)
                start.record()
                keys, values = attend.expanded(k, v, heads) if expanded else (k, v)
                out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=keys.shape[1] != heads)
                torch.autograd.backward(out, grad)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
    except (RuntimeError, ValueError, TypeError, AssertionError, ImportError):  # the latter from FlashAttention-4
        return None
    return float(median(times[1:]))
