"""Adapters on one GPU: Llama-3-8B by LoRA, ours and transformers + peft in turn on the same card, and ours in 4 bits.

    python benchmarks/lora_h200.py [--out FILE]      # about six minutes on an H200
    python benchmarks/lora_h200.py --tiny            # the same on a CPU in two minutes: shows that the script runs

Rank 16, alpha 32, adapters of all seven projections, S 2048, bf16, AdamW over the adapters' fp32 masters, clipping,
accumulation 1, random tokens without padding, random initial weights made on the machine. Ours is `meshwright.bench`,
compiled; peft's model has its adapters as they are by default (fp32, cast around each product), torch's fused AdamW and
sdpa, and runs eagerly, or with every layer compiled. Each line is a process of its own: tokens over the wall time of
--steps steps after --warmup, between two waits for the device, and the allocator's peak over the process's life. The
lines in 4 bits run under an allocator limit of 24 GiB (torch.cuda.set_per_process_memory_fraction). All of it ends
within --seconds: a line that takes longer than --limit, or than is left, is stopped and said to be; a line that fails
leaves the others as they are.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HERE = Path(__file__).parent
LIMIT_GIB = 24
LEAST_S = 40.0
"""In less than this no line ends."""
SEQUENCE, RANK, ALPHA = 2048, 16, 32.0
LINES: dict[str, Row] = {
    "ours, bf16, micro-batch 4": {"system": "ours", "micro_batch": 4},
    "peft, bf16, micro-batch 4, compiled": {"system": "peft", "micro_batch": 4, "compile": True},
    "ours, nf4 in 24 GiB, micro-batch 2": {
        "system": "ours", "micro_batch": 2, "base": "nf4", "recompute": "selective", "limit_gib": LIMIT_GIB
    },
    "peft, bf16, micro-batch 4": {"system": "peft", "micro_batch": 4},
    "peft, bf16, micro-batch 8, recomputed": {"system": "peft", "micro_batch": 8, "recompute": "full"},
    "ours, bf16, micro-batch 8, recomputed": {"system": "ours", "micro_batch": 8, "recompute": "full"},
}  # fmt: skip
"""By importance."""
SHAPE = {
    "vocab_size": 128256,
    "width": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn_width": 14336,
}
TINY = {"vocab_size": 512, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 128}


def main() -> None:
    """Measure one line in this process, or all in turn, each in its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", choices=list(LINES), help="measure this one here")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=390.0, help="of all lines together")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one line")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU instead")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.line is not None:
        line = LINES[asked.line]
        print(json.dumps((ours if line["system"] == "ours" else peft)(line, asked)))
        return
    print(__doc__, flush=True)
    rows = in_turn(asked)
    for sentence in compared(rows):
        print(sentence)
    if asked.out is not None:
        report = {"how": __doc__, "rows": rows, "compared": compared(rows)}
        asked.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(any("error" in row for row in rows.values()))


def in_turn(asked: argparse.Namespace) -> dict[str, Row]:
    """Every line's result, printed as it comes."""
    began, rows = time.monotonic(), dict[str, Row]()
    for name in LINES:
        left = asked.seconds - (time.monotonic() - began)
        if left < LEAST_S and not asked.tiny:
            print(f"{name}: no time left", flush=True)
            continue
        limit = None if asked.tiny else min(asked.limit, left)
        command = [sys.executable, __file__, "--line", name, "--steps", str(asked.steps), "--warmup", str(asked.warmup)]
        started = time.monotonic()
        rows[name] = run([*command, "--tiny"] if asked.tiny else command, limit)
        rows[name]["process_s"] = round(time.monotonic() - started, 1)
        print(f"{name}: {shown(rows[name])}", flush=True)
    return rows


def run(command: list[str], limit: float | None) -> Row:
    """What a line's process prints last; it and all it started are ended after the limit."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # processes that compile would keep the pipes open
        process.communicate()
        return {"error": f"stopped after {limit:.0f} s"}
    if process.returncode != 0:
        return {"error": f"exit code {process.returncode}: {errors[-1500:]}"}
    row: Row = json.loads(printed.strip().splitlines()[-1])
    return row


def ours(line: Row, asked: argparse.Namespace) -> Row:
    """Our trainer's own loop."""
    import torch

    import meshwright

    sequence, micro_batch = (64, 1) if asked.tiny else (SEQUENCE, line["micro_batch"])
    if not asked.tiny and "limit_gib" in line:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(line["limit_gib"] * 2**30 / whole)
    adapter = {"rank": RANK, "alpha": ALPHA, "base": line.get("base", "compute")}
    shape = {**(TINY if asked.tiny else SHAPE), "max_sequence_length": 8192, "rope_theta": 500000.0, "adapter": adapter}
    job = {
        "model": shape,
        "data": {"sources": ["builtin:synthetic"], "mask_documents": False, "workers": 0 if asked.tiny else 2},
        "batch": {"sequence_length": sequence, "global_batch": micro_batch, "micro_batch": micro_batch},
        "precision": {"compute": "bf16"},
        "memory": {"recompute": line.get("recompute", "none")},
        "optimizer": {"lr": 1e-4, "clip": 1.0},
        "evaluation": {"every_steps": 0},
        "run": {"device": "cpu" if asked.tiny else "cuda", "compile": not asked.tiny},
    }
    found = meshwright.bench(meshwright.Job.model_validate(job), steps=asked.steps, warmup=asked.warmup)
    assert found is not None
    peak = found.peak_memory_bytes
    return {
        "tokens_per_s": found.tokens_per_step * found.steps / found.timed_s,
        "peak_gib": None if peak is None or asked.tiny else peak / 2**30,
        "first_step_s": found.first_step_s,
        "loss": found.losses[-1],
        "torch": found.torch,
        "device": found.device,
    }


def peft(line: Row, asked: argparse.Namespace) -> Row:
    """transformers' model with peft's adapters, in the plainest loop."""
    import peft
    import torch
    import transformers

    device = "cpu" if asked.tiny else "cuda"
    sequence, micro_batch, size = (64, 1, TINY) if asked.tiny else (SEQUENCE, line["micro_batch"], SHAPE)
    config = transformers.LlamaConfig(
        vocab_size=size["vocab_size"], hidden_size=size["width"], intermediate_size=size["ffn_width"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"], num_key_value_heads=size["kv_heads"],
        head_dim=size["head_dim"], max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        base = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    if line.get("recompute") == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if line.get("compile") and not asked.tiny:
        for layer in base.model.layers:
            layer.compile()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not asked.tiny)
    started, first_step_s, loss = 0.0, 0.0, torch.zeros(())
    for step in range(asked.warmup + asked.steps):
        if step == asked.warmup:
            started = waited(device)
        began = time.perf_counter()
        tokens = torch.randint(0, size["vocab_size"], (micro_batch, sequence), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            first_step_s = waited(device) - began
    seconds = waited(device) - started
    return {
        "tokens_per_s": asked.steps * micro_batch * sequence / seconds,
        "peak_gib": None if asked.tiny else torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": first_step_s,
        "loss": float(loss.detach()),
        "torch": torch.__version__,
        "versions": f"transformers {transformers.__version__}, peft {peft.__version__}",
    }


def waited(device: str) -> float:
    """The time when the device has done all it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def shown(row: Row) -> str:
    """A result in one line."""
    if "error" in row:
        return f"failed: {row['error']}"
    peak = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
    about = f"first step {row['first_step_s']:.0f} s, process {row['process_s']:.0f} s, loss {row['loss']:.3f}"
    return f"{row['tokens_per_s']:,.0f} tokens/s{peak} ({about})"


def compared(rows: dict[str, Row]) -> list[str]:
    """Ratios of what was measured."""
    pairs = [
        ("ours, bf16, micro-batch 4", "peft, bf16, micro-batch 4"),
        ("ours, bf16, micro-batch 4", "peft, bf16, micro-batch 4, compiled"),
        ("ours, bf16, micro-batch 8, recomputed", "peft, bf16, micro-batch 8, recomputed"),
        ("ours, nf4 in 24 GiB, micro-batch 2", "ours, bf16, micro-batch 4"),
    ]
    sentences = []
    for one, other in pairs:
        a, b = rows.get(one, {"error": ""}), rows.get(other, {"error": ""})
        if "error" in a or "error" in b:
            continue
        sentence = f"{one}: {a['tokens_per_s'] / b['tokens_per_s']:.2f} × the tokens/s of {other}"
        if a["peak_gib"] is not None and b["peak_gib"] is not None:
            sentence += f", {a['peak_gib'] / b['peak_gib']:.2f} × its memory"
        sentences.append(sentence)
    return sentences


if __name__ == "__main__":
    main()
