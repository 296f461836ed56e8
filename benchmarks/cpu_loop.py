"""The demo on a CPU compared with a plain loop of the same shape: what the framework costs where nothing hides it.

    python benchmarks/cpu_loop.py [--repeats 3] [--steps 20] [--out FILE]

ours    `meshwright bench demo`: the real loop with workers, recording, norms by rows in float64, chunked loss
plain   the same decoder in sixty lines of plain torch: whole logits, F.cross_entropy, fused AdamW, clip_grad_norm_,
        random windows of one token array, the same batch, accumulation, format (fp32) and number of threads

Both run in separate processes, in turn, `repeats` times; a repeat's figure is tokens/s by its median step, the
result is the ratio of the medians over repeats.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WARMUP = 3


def plain_loop(steps: int) -> dict[str, Any]:
    """Train the demo's shape without any of our training code."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from meshwright.job import load_job

    job = load_job("demo").job
    shape, batch = job.model, job.batch
    head_dim = shape.head_dim

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner, kv = shape.heads * head_dim, shape.kv_heads * head_dim
            self.norms = nn.ModuleList(nn.RMSNorm(shape.width, eps=shape.norm_eps) for _ in range(2))
            self.qkv = nn.Linear(shape.width, inner + 2 * kv, bias=False)
            self.out = nn.Linear(inner, shape.width, bias=False)
            self.gate_up = nn.Linear(shape.width, 2 * shape.ffn_width, bias=False)
            self.down = nn.Linear(shape.ffn_width, shape.width, bias=False)
            self.sizes = (inner, kv, kv)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norms[0](x)).split(self.sizes, dim=-1)
            q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    torch.manual_seed(0)
    embed = nn.Embedding(shape.vocab_size, shape.width)
    blocks = nn.ModuleList(Block() for _ in range(shape.layers))
    norm, head = nn.RMSNorm(shape.width, eps=shape.norm_eps), nn.Linear(shape.width, shape.vocab_size, bias=False)
    if shape.tied:
        head.weight = embed.weight
    model = nn.ModuleList([embed, blocks, norm, head])
    angles = torch.arange(batch.sequence_length)[:, None] * shape.rope_theta ** -(
        torch.arange(0, head_dim, 2) / head_dim
    )
    cos, sin = angles.cos(), angles.sin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=job.optimizer.betas, fused=True)
    tokens = torch.randint(shape.vocab_size, (1_000_000,))
    times = []
    for _ in range(WARMUP + steps):
        started = time.perf_counter()
        for _ in range(job.accumulation):
            starts = torch.randint(len(tokens) - batch.sequence_length - 1, (batch.micro_batch,))
            windows = torch.stack([tokens[i : i + batch.sequence_length + 1] for i in starts])
            x = embed(windows[:, :-1])
            for block in blocks:
                x = block(x, cos, sin)
            loss = F.cross_entropy(head(norm(x)).flatten(0, 1), windows[:, 1:].flatten()) / job.accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - started)
    return {"tokens_per_s": job.tokens_per_step / statistics.median(times[WARMUP:])}


def ours(steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "meshwright", "bench", "demo", "--set", "run.device=cpu", "--json"]
    counts = ["--steps", str(steps), "--warmup", str(WARMUP)]
    result: dict[str, Any] = json.loads(subprocess.run([*command, *counts], check=True, stdout=subprocess.PIPE).stdout)
    return result


def plain(steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--plain", "--steps", str(steps)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        print(json.dumps(plain_loop(arguments.steps)))
        return
    print(__doc__)
    seen: dict[str, list[float]] = {"ours": [], "plain": []}
    for repeat in range(arguments.repeats):
        for name, measure in (("ours", ours), ("plain", plain)):
            seen[name].append(measure(arguments.steps)["tokens_per_s"])
            print(f"repeat {repeat + 1}  {name:6} {seen[name][-1]:,.0f} tokens/s", flush=True)
    ratio = statistics.median(seen["ours"]) / statistics.median(seen["plain"])
    print(f"ours / plain = {ratio:.3f}")
    if arguments.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "cores": len(os.sched_getaffinity(0)), "steps": arguments.steps}
        arguments.out.write_text(json.dumps({**facts, "tokens_per_s": seen, "ratio": round(ratio, 3)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
