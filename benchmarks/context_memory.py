"""Peak memory of attention over a sequence that ranks share: ring attention's grows with S / cp, not with S or S².

    python benchmarks/context_memory.py [--ranks 2 4] [--out FILE]      forked CPU ranks, forward and backward, float32
    python benchmarks/context_memory.py --device cuda [--out FILE]      one card: checks of the flash blocks, then bytes

On CPU the bytes are those of torch's own memory profiler, which notes every allocation and release of the CPU
allocator, also inside kernels; what a rank holds before the call (q, k, v and the result's gradient) is added. The line
bytes = a + b · S / cp is fitted by least squares for each cp.

On CUDA there is no process group: one card simulates all ranks of a ring, in bf16 (the flash kernels, with spans
for documents) and in float32 (the formulas), and compared; float64 is compared with attention over the whole. Then peak
bytes of the allocator: single-card flash attention, and one rank of a ring whose arrivals are copies of what it sends.
"""

import argparse
import json
import time
from collections.abc import Generator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.model import CausalAttend, Documents
from meshwright.parallel.context.attention import make_context_attend
from meshwright.parallel.context.order import order_of, zigzag_places
from meshwright.parallel.context.rings import ring_backward, ring_forward, run_in_step
from meshwright.verify import run_ranks

LENGTHS = [2048, 4096, 8192, 16384, 32768]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float64: 1e-12}
"""Largest allowed difference, relative to the largest entry."""


# ---- CPU ranks ----


def allocated_peak(function) -> int:
    """The most bytes of CPU tensors that `function` held at once, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def ring_peaks(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Peak bytes on this rank for each length."""
    attend = make_context_attend("ring", dist.group.WORLD, None)
    peaks = []
    for sequence in LENGTHS:
        length = sequence // dist.get_world_size()
        q, k, v = (torch.randn(1, length, count, head_dim).requires_grad_() for count in (heads, kv_heads, kv_heads))
        grad = torch.randn(1, length, heads, head_dim)

        def both(q=q, k=k, v=v, grad=grad) -> None:
            attend(q, k, v, None, None)[0].backward(grad)

        before = sum(tensor.numel() * tensor.element_size() for tensor in (q, k, v, grad))
        peaks.append(before + allocated_peak(both))
    return peaks


def fit(lengths: list[int], peaks: list[int]) -> dict[str, float]:
    """a and b of bytes = a + b · length, and the largest deviation as a part of the value."""
    x = torch.tensor([[1.0, length] for length in lengths], dtype=torch.float64)
    y = torch.tensor(peaks, dtype=torch.float64).unsqueeze(1)
    line = torch.linalg.lstsq(x, y).solution
    worst = ((x @ line - y) / y).abs().max().item()
    return {"a_bytes": round(line[0].item()), "b_bytes_per_token": round(line[1].item(), 1), "worst": round(worst, 5)}


def on_cpu(ranks: list[int]) -> dict[str, object]:
    known = allocated_peak(lambda: torch.empty(2**20).neg())
    assert known == 2 * 4 * 2**20, f"the profiler counted {known} bytes for two tensors of 4 MiB"
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32}
    result: dict[str, object] = {"shape": shape, "dtype": "float32"}
    for size in ranks:
        peaks = [
            max(of_ranks)
            for of_ranks in zip(*run_ranks(ring_peaks, size, *shape.values(), timeout_s=3000), strict=True)
        ]
        line = fit([sequence // size for sequence in LENGTHS], peaks)
        for sequence, peak in zip(LENGTHS, peaks, strict=True):
            print(f"ring cp {size}  S {sequence:6}  S/cp {sequence // size:6}  peak {peak:12,} bytes a rank")
        slope, worst = line["b_bytes_per_token"], line["worst"]
        print(f"ring cp {size}  bytes = {line['a_bytes']:,} + {slope} · S/cp, off by {worst:.3%} at most")
        result[f"ring_cp{size}"] = {"peak_bytes": dict(zip(LENGTHS, peaks, strict=True)), "fit": line}
    return result


# ---- One CUDA card ----


def played(inputs: list[Tensor], ranks: int, documents: Documents | None, window: int | None) -> list[Tensor]:
    """out, lse and gradients of the whole sequence, by a ring whose ranks are all in this process."""
    q, k, v, grad = inputs
    sequence = q.shape[1]
    places = [zigzag_places(sequence, rank, ranks, q.device) for rank in range(ranks)]
    orders = [order_of(rank, ranks, sequence, documents, window, q.device) for rank in range(ranks)]
    kvs = [torch.stack((k[:, held], v[:, held])) for held in places]
    forward = run_in_step([ring_forward(q[:, places[r]], kvs[r], orders[r]) for r in range(ranks)])
    backward = run_in_step(
        [ring_backward(grad[:, places[r]], q[:, places[r]], kvs[r], *forward[r], orders[r]) for r in range(ranks)]
    )
    back = torch.cat(places).argsort()
    parts = [[out, lse.transpose(1, 2), *grads] for (out, lse), grads in zip(forward, backward, strict=True)]
    return [torch.cat(tensors, 1)[:, back] for tensors in zip(*parts, strict=True)]


def whole(inputs: list[Tensor], documents: Documents | None, window: int | None) -> list[Tensor]:
    """out and gradients by attention over the whole sequence."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    out, _ = CausalAttend(window)(*leaves, None, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def compare(name: str, found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> dict[str, object]:
    errors = [(a.to(b.dtype) - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    parts = [error / b.abs().max().item() for error, b in zip(errors, expected, strict=True)]
    good = all(part <= TOLERANCE[dtype] for part in parts)  # False where an entry is NaN
    print(f"{name:52} {'  '.join(f'{error:.1e}' for error in errors)}  {'ok' if good else 'FAILED'}")
    return {"name": name, "max_errors": errors, "ok": good}


def checks(device: torch.device) -> list[dict[str, object]]:
    """Blocks of the flash kernels against the formulas, and the formulas against attention over the whole."""
    torch.manual_seed(0)
    sequence, results = 2048, []
    lengths = [[700, 3, 1, 600, 744], [256, 256, 1024, 500, 12]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(5), torch.tensor(row)) for row in lengths]).to(device)
    packed = Documents(ids, at_most=16).bounded()
    print(f"{'largest differences':52} out, lse, q, k, v (float64: no lse)")
    for ranks in (2, 4, 8):
        for label, documents in (("", None), (", documents", packed)):
            for kv_heads in (8, 2):
                given = [torch.randn(2, sequence, heads, 64, device=device) for heads in (8, kv_heads, kv_heads, 8)]
                name = f"cp {ranks}, 8 heads over {kv_heads}{label}"
                rounded = [tensor.bfloat16() for tensor in given]
                flash = played(rounded, ranks, documents, None)
                formulas = played([tensor.float() for tensor in rounded], ranks, documents, None)
                results.append(compare(f"{name}: bf16 flash, formulas", flash, formulas, torch.bfloat16))
            for window in (None, 300):
                doubles = [torch.randn(2, 512, heads, 64, device=device).double() for heads in (4, 2, 2, 4)]
                short = None if documents is None else Documents(ids[:, 500:1012].contiguous())
                ring = played(doubles, ranks, short, window)
                name = f"cp {ranks}{label}{', window 300' if window else ''}: float64 formulas, whole"
                expected = whole(doubles, short, window)
                results.append(compare(name, [ring[0], *ring[2:]], expected, torch.float64))
    return results


def alone(part: Generator[Tensor, object, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One rank's part of a ring; a copy of what it sends arrives, which takes the same memory as the real thing."""
    try:
        outgoing = next(part)
        while True:
            arriving = outgoing.clone()
            outgoing = part.send(lambda arriving=arriving: arriving)
    except StopIteration as end:
        return end.value


def card_peak(function) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def on_cuda() -> dict[str, object]:
    device = torch.device("cuda")
    results = checks(device)
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    heads, kv_heads, head_dim = shape.values()
    peaks: dict[str, dict[int, int]] = {"single card": {}, "ring, one rank of 4": {}, "ring, one rank of 8": {}}
    for sequence in LENGTHS:
        for label, ranks in zip(peaks, (1, 4, 8), strict=True):
            length = sequence // ranks
            q, k, v, grad = (
                torch.randn(1, length, count, head_dim, device=device, dtype=torch.bfloat16)
                for count in (heads, kv_heads, kv_heads, heads)
            )

            def on_one_card(q=q, k=k, v=v, grad=grad) -> None:
                whole([q, k, v, grad], None, None)

            def as_one_rank(q=q, k=k, v=v, grad=grad, ranks=ranks, sequence=sequence) -> None:
                order = order_of(ranks // 2, ranks, sequence, None, None, device)
                out, lse = alone(ring_forward(q, torch.stack((k, v)), order))
                alone(ring_backward(grad, q, torch.stack((k, v)), out, lse, order))

            before = torch.cuda.memory_allocated() - sum(t.numel() * t.element_size() for t in (q, k, v, grad))
            peaks[label][sequence] = card_peak(on_one_card if ranks == 1 else as_one_rank) - before
            print(f"{label:20} S {sequence:6}  peak {peaks[label][sequence]:14,} bytes")
    name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "checks": results, "shape": shape, "bf16_peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    result = {"date": time.strftime("%Y-%m-%d")} | (
        on_cuda() if arguments.device == "cuda" else on_cpu(arguments.ranks)
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    failed = [check for check in result.get("checks", []) if not check["ok"]]
    if failed:
        raise SystemExit(f"{len(failed)} checks failed")


if __name__ == "__main__":
    main()
