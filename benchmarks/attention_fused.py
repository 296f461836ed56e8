"""What fusing attention is worth on one GPU: torch's fused kernels against attention written out, over the sequence.

    python benchmarks/attention_fused.py [--lengths 512 1024 …] [--limit-s 85] [--out FILE]

Causal attention in bf16 with the heads of Llama-3.2-1B (32 of 64) and of Llama-3-8B (32 of 128), 16,384 tokens in all,
or one sequence if it is longer. Queries, keys and values have equally many heads, so that all kernels get the same.

fused     flash, cudnn, efficient: scaled_dot_product_attention with that backend only
written   softmax(q kᵀ / √d + mask) v with bf16 matrices of S × S, the scale on q and the mask in place
math      scaled_dot_product_attention with torch's MATH backend, whose S × S matrices are in fp32

Time is the median of device-event timings after two warm-ups, over 3 calls at least and 20 at most, or 0.25 s. Memory
is torch's peak allocation above q, k, v, the mask and the given gradient; with the backward it includes the gradients
of q, k and v. Before any timing, each kernel's output and gradients are compared with fp32 at S 512. Ratios divide by
the fastest of the three fused kernels. A kernel that runs out of memory or refuses is recorded as such.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"llama-3.2-1b": (32, 64), "llama-3-8b": (32, 128)}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384
FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROW = "{:<13} {:>6} {:>3}  {:<17} " + "{:>11} " * 5 + "{:>9} {:>9}"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_backend(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


@lru_cache(maxsize=1)
def hidden(length: int) -> Tensor:
    """The causal mask, which a model makes once."""
    return torch.ones(length, length, dtype=torch.bool, device="cuda").triu_(1)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a model's first version would have it, without needless copies of the S × S matrix."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return scores.masked_fill_(hidden(q.shape[-2]), -math.inf).softmax(-1) @ v


KERNELS: dict[str, Attention] = {
    **{name: with_backend(backend) for name, backend in FUSED.items()},
    "written": written,
    "math": with_backend(SDPBackend.MATH),
}


def drawn(batch: int, length: int, heads: int, width: int) -> list[Tensor]:
    """q, k, v in bf16, heads before positions, laid out as projections leave them."""
    shape = (batch, length, heads, width)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]


def compared(heads: int, width: int) -> dict[str, Any]:
    """The largest error of each kernel's output and gradients against fp32, as a share of the largest entry."""
    inputs = drawn(2, 512, heads, width)
    gradient = torch.randn_like(inputs[0])
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = written(*exact)
    truth = [out, *torch.autograd.grad(out, exact, gradient.float())]
    errors: dict[str, Any] = {}
    for name, attend in KERNELS.items():
        try:
            out = attend(*inputs)
            found = [out, *torch.autograd.grad(out, inputs, gradient)]
        except RuntimeError as error:
            errors[name] = reason(error)
            continue
        errors[name] = max(_error(f.detach(), t.detach()) for f, t in zip(found, truth, strict=True))
        if errors[name] > 0.03:  # bf16 has 8 bits: 0.4% per rounding
            raise SystemExit(f"{name} computes something else: off by {errors[name]:.1%} of the largest entry")
    return errors


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).abs().max() / truth.abs().max())


def reason(error: RuntimeError) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).splitlines()[0][:120]


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Median, least and most milliseconds of a call, and its peak memory above what stands."""
    torch.cuda.synchronize()
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - standing
    times: list[float] = []
    began = time.monotonic()
    while len(times) < 3 or (len(times) < 20 and time.monotonic() - began < 0.25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": round(statistics.median(times), 4),
        "ms_least": round(min(times), 4),
        "ms_most": round(max(times), 4),
        "calls": len(times),
        "peak_gib": round(peak / 2**30, 3),
    }


def measure(attend: Attention, inputs: list[Tensor], gradient: Tensor, backward: bool) -> dict[str, Any]:
    def call() -> None:
        if backward:
            torch.autograd.grad(attend(*inputs), inputs, gradient)
        else:
            with torch.no_grad():
                attend(*inputs)

    try:
        return timed(call)
    except RuntimeError as error:
        return {"failed": reason(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def ratios(kernels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each unfused kernel against the fastest fused one, in time and in memory."""
    fused = {name: kernels[name] for name in FUSED if "ms" in kernels[name]}
    if not fused:
        return {}
    fastest = min(fused, key=lambda name: float(fused[name]["ms"]))
    found: dict[str, Any] = {"fastest fused": fastest}
    for name in ("written", "math"):
        if "ms" in kernels[name]:
            found[f"{name} / fused time"] = round(kernels[name]["ms"] / fused[fastest]["ms"], 2)
            found[f"{name} / fused memory"] = round(
                kernels[name]["peak_gib"] / max(fused[fastest]["peak_gib"], 1e-3), 1
            )
    return found


def shown(result: dict[str, Any]) -> str:
    def cell(name: str) -> str:
        kernel = result["kernels"][name]
        return f"{kernel['ms']:.2f}/{kernel['peak_gib']:.1f}" if "ms" in kernel else kernel["failed"][:11]

    found = result["ratios"]
    cells = [*map(cell, KERNELS), *(found.get(f"{name} / fused time", "–") for name in ("written", "math"))]
    return ROW.format(result["model"], result["sequence"], result["batch"], result["passes"], *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--limit-s", type=float, default=85.0, help="start no length after this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU's attention kernels, but there is no GPU")
    began = time.monotonic()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "how": __doc__,
        "largest_error": {name: compared(*shape) for name, shape in SHAPES.items()},
        "results": [],
    }
    print("largest error against fp32:", json.dumps(facts["largest_error"]))
    print("milliseconds / peak GiB")
    print(ROW.format("model", "S", "B", "passes", *KERNELS, "written÷", "math÷"))
    for length in arguments.lengths:  # the shorter ones of both models first: a limit leaves out the longest
        for model, (heads, width) in SHAPES.items():
            if time.monotonic() - began > arguments.limit_s:
                print(f"not started after {arguments.limit_s:.0f} s: {model}, S {length}", flush=True)
                continue
            batch = max(1, TOKENS // length)
            inputs = drawn(batch, length, heads, width)
            gradient = torch.randn_like(inputs[0])
            hidden(length)
            for backward in (False, True):
                result: dict[str, Any] = {"model": model, "sequence": length, "batch": batch}
                result["passes"] = "forward, backward" if backward else "forward"
                result["kernels"] = {name: measure(f, inputs, gradient, backward) for name, f in KERNELS.items()}
                result["ratios"] = ratios(result["kernels"])
                facts["results"].append(result)
                print(shown(result), flush=True)
    facts["seconds"] = round(time.monotonic() - began, 1)
    print(f"{facts['seconds']} s")
    out = arguments.out or Path(__file__).parent / "results" / f"{facts['date']}-attention-fused-h200.json"
    out.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
