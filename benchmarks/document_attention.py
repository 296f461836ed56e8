"""What masking documents costs on a GPU: forward and backward of one attention, by how the boundaries are given.

    python benchmarks/document_attention.py

B 8, S 4096, 32 heads, 8 kv heads, head size 64, bf16, documents of about 1000 tokens. Median of 20 timings with device
events after 5 warm-ups. `varlen N` gives the variable-length kernel N boundaries of which the unused repeat the total.
"""

import json
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

B, S, H, K, E = 8, 4096, 32, 8, 64


def timed(function, inputs: list[Tensor]) -> float:
    times = []
    for repeat in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(*inputs).backward(torch.ones(B, S, H, E, device="cuda", dtype=torch.bfloat16))
        end.record()
        torch.cuda.synchronize()
        if repeat >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def padded(boundaries: Tensor, count: int) -> Tensor:
    return torch.cat([boundaries, boundaries.new_full((count - len(boundaries),), B * S)])


def main() -> None:
    print(__doc__)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, S, heads, E, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (H, K, K)
    )
    starts = torch.cat([torch.arange(B) * S, torch.randint(0, B * S, (B * 4,))]).unique()
    exact = torch.cat([starts, torch.tensor([B * S])]).to("cuda", torch.int32)

    def varlen(boundaries: Tensor):
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (t.repeat_interleave(H // K, dim=2) for t in (k, v))
            flat = [t.flatten(0, 1) for t in (q, k, v)]
            return varlen_attn(*flat, boundaries, boundaries, S, S, window_size=(-1, 0)).view(B, S, H, E)

        return run

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    results = {"plain causal, no documents": timed(plain, [q, k, v])}
    for count in (len(exact), B * 16 + 1, B * 64 + 1, B * 256 + 1, B * S + 1):
        try:
            results[f"varlen {count}"] = timed(varlen(padded(exact, count)), [q, k, v])
        except RuntimeError as error:
            results[f"varlen {count}"] = str(error).splitlines()[0]
    print(json.dumps({"ms": results, "documents": len(exact) - 1, "torch": torch.__version__}, indent=2))


if __name__ == "__main__":
    main()
