"""Which of torch's attention kernels a run uses on a GPU: the fastest that supports the job's shapes, measured at the
start, and recorded so that a resumed run uses the same one."""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.job import Job
from meshwright.model import attend
from meshwright.model.numbers import DTYPES
from meshwright.parallel import World

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
REPEATS = 3


def choose_attention(job: Job, world: World, remembered: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Make plain causal attention use the fastest kernel; returns the choice and how long each took.

    Rank 0's choice from an earlier attempt is used again instead.
    None if there is nothing to choose: on a CPU, in fp32, and with masks that only one kernel supports.
    """
    if world.device.type != "cuda" or job.precision.number_bytes != 2 or job.data.mask_documents:
        return None
    chosen = _agreed(remembered or _measured(job, world.device) if world.rank == 0 else None, world)
    kernel, groups = chosen["kernel"], chosen["groups"]
    torch.backends.cuda.enable_cudnn_sdp(kernel != "flash")
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
    attend.EXPAND_GROUPS = groups == "expanded"
    return chosen


def _agreed(found: dict[str, Any] | None, world: World) -> dict[str, Any]:
    """Rank 0's choice on all ranks: another kernel rounds differently."""
    report = [found]
    if world.size > 1:
        dist.broadcast_object_list(report, src=0)
    assert report[0] is not None
    return report[0]


def _measured(job: Job, device: torch.device) -> dict[str, Any]:
    shape, layout = job.model, job.layout
    heads, kv_heads = shape.heads // layout.tp, max(1, shape.kv_heads // layout.tp)
    sizes = (job.batch.micro_batch, job.batch.sequence_length, shape.head_dim)
    milliseconds = {}
    for kernel, backend in BACKENDS.items():
        for groups in ("native", "expanded") if heads != kv_heads else ("native",):
            taken = _time(backend, sizes, heads, kv_heads, groups == "expanded", DTYPES[job.precision.compute], device)
            if taken is not None:
                milliseconds[f"{kernel}, {groups}"] = round(taken, 3)
    fastest = min(milliseconds, key=lambda name: milliseconds[name], default="torch's choice, native")
    kernel, groups = fastest.split(", ")
    return {"kernel": kernel, "groups": groups, "milliseconds": milliseconds}


def _time(
    backend: SDPBackend,
    sizes: tuple[int, int, int],
    heads: int,
    kv_heads: int,
    expanded: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> float | None:
    """Milliseconds of one forward and backward; None if the kernel does not support it."""
    batch, sequence, head_dim = sizes

    def drawn(count: int) -> torch.Tensor:
        made = torch.randn(batch, sequence, count, head_dim, dtype=dtype, device=device)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = drawn(heads), drawn(kv_heads), drawn(kv_heads)
    grad = torch.randn_like(q)
    times = []
    try:
        with sdpa_kernel(backend):
            for _ in range(REPEATS + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                keys, values = attend.expanded(k, v, heads) if expanded else (k, v)
                out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=keys.shape[1] != heads)
                torch.autograd.backward(out, grad)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
    except RuntimeError:
        return None
    return float(median(times[1:]))
