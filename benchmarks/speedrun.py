"""Time to a loss on one GPU: the recipe speedrun-124m next to a plain GPT-2 recipe and to peers, on the same text.

    python benchmarks/speedrun.py --corpus FILE [--systems ours,gpt2,torchtitan] [--seed N] [--out FILE.jsonl]
    python benchmarks/speedrun.py --corpus FILE --ablate             # ours, less one ingredient at a time
    python benchmarks/speedrun.py --corpus FILE --sweep optimizer.lr=3e-3,6e-3,1e-2   # ours, one field changed
    python benchmarks/speedrun.py --report FILE.jsonl [--target L]   # the table of what was appended so far
    python benchmarks/speedrun.py --tiny                             # everything small, on a CPU, in a minute or two

FILE is what speedrun_corpus.py wrote; it is unpacked and tokenised once, next to it. Each system is a process:

    ours          `meshwright train speedrun-124m`
    gpt2          GPT-2 with nanoGPT's hyperparameters in our trainer: AdamW at 6e-4, betas 0.9 and 0.95, decay 0.1,
                  clipping at 1, a cosine to a tenth, learned positions, LayerNorm, GELU, a tied head, no biases of
                  projections and no dropout
    torchtitan    0.2.2: its Llama of our shape, its default optimizer and schedule (AdamW at 8e-4, linear to zero)
    transformers  its Trainer and Llama likewise, its defaults at 6e-4

All have the same batch (64 × 1024 tokens), the same sequences (the peers from memory, the first two in the same order)
and the same held-out sequences, whose mean loss they are judged by. Seconds are those of training steps on the wall
clock, without evaluations and preparation: the first steps, in which everything is compiled, count as long as the
others on average; what they took longer is `compile_s`. The target is reached at the first evaluation at or below it;
without --target it is the highest of all systems' best losses, so that each reaches it. Every run is appended to --out.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
from gpu_readings import gpu_readings  # noqa: E402
from shapes import Setting  # noqa: E402

Row = dict[str, Any]
SETTLE = 5
"""Steps that count as long as the others on average."""
SHAPE = Setting(12, 768, 12, 12, 2048, 32768, 1024, 64, False)
STEPS = {"ours": 250, "gpt2": 500, "torchtitan": 500, "transformers": 500}
"""torchtitan's loss after 500 is the target; GPT-2's recipe gets more time than ours needs for it, over 0.6."""
EVERY = {"ours": 25, "gpt2": 50, "torchtitan": 50, "transformers": 50}
GPT2 = [
    *('model.preset="gpt2"', "model.qkv_bias=false", "model.linear_bias=false"),
    *('optimizer.name="adamw"', "optimizer.lr=6e-4", "optimizer.betas=[0.9, 0.95]", "optimizer.weight_decay=0.1"),
    *("optimizer.clip=1.0", 'schedule.name="cosine"', "schedule.min_lr_ratio=0.1"),
]
BATCH = ["batch.sequence_length=1024", "batch.global_batch=64", "batch.micro_batch=64"]
COMMON = ["evaluation.batches=4", "evaluation.sample_tokens=0", 'precision.compute="bf16"', "run.compile=true"]
ABLATIONS = {
    "muon": ['optimizer.name="adamw"', "optimizer.lr=1e-3"],
    "linear decay": ['schedule.name="cosine"', "schedule.min_lr_ratio=0.1"],
    "norms of queries and keys": ["model.qk_norm=false"],
    "rotary positions": ['model.positions="learned"'],
    "swiglu": ['model.activation="gelu"', "model.ffn_width=3072"],
    "rmsnorm": ['model.norm="layernorm"'],
    "a tied head": ["model.tied=false"],
    "heads of 128": ["model.heads=12", "model.kv_heads=12", "model.head_dim=64"],
}
TINY = Setting(2, 64, 4, 4, 128, 512, 64, 4, False, compute="fp32", compile=False, device="cpu")
TINY_FIELDS = [
    *("model.vocab_size=512", "model.width=64", "model.layers=2", "model.heads=4", "model.kv_heads=4"),
    *("model.head_dim=16", "model.ffn_width=128", "model.max_sequence_length=64", "batch.sequence_length=64"),
    *("batch.global_batch=4", "batch.micro_batch=4", 'precision.compute="fp32"', "run.compile=false"),
    *('run.device="cpu"', "evaluation.batches=2", "schedule.warmup_steps=2", "data.workers=0"),
]


def main() -> None:
    """Run the systems in turn, append what they did, print the table."""
    asked = parse()
    if asked.report:
        print(table(lines(asked.report), asked.target))
        return
    began = time.monotonic()
    text, prepared_s = prepared(asked)
    print(f"text prepared in {prepared_s:.1f} s", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name, system, fields in plan(asked):
            row = {"run": name, "system": system, "seed": asked.seed, "steps": asked.steps[system]}
            left = asked.limit_s - (time.monotonic() - began)
            row |= one(system, fields, text, asked, Path(temporary), left)
            failed |= "failed" in row
            print(json.dumps({key: value for key, value in row.items() if key not in ("curve", "marks")}), flush=True)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(table(lines(asked.out), asked.target))
    sys.exit(failed)


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="the file of speedrun_corpus.py")
    parser.add_argument("--systems", default="ours,gpt2,torchtitan")
    parser.add_argument("--ablate", nargs="?", const=",".join(ABLATIONS), default="", metavar="INGREDIENTS")
    parser.add_argument("--sweep", metavar="FIELD=VALUE,VALUE,…", help="ours with each value of a field")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="append", default=[], metavar="SYSTEM=N")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of our recipe's job")
    parser.add_argument("--target", type=float, help="the loss to reach")
    parser.add_argument("--limit-s", type=float, default=540.0, help="a run that would last longer is stopped")
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun.jsonl"), help="appended to")
    parser.add_argument("--report", type=Path, help="print the table of this file, and run nothing")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if not (asked.corpus or asked.report or asked.tiny):
        parser.error("name the --corpus that speedrun_corpus.py wrote, or --tiny")
    given = dict(word.split("=", 1) for word in asked.steps)
    asked.steps = STEPS | (dict.fromkeys(STEPS, 30) if asked.tiny else {})
    asked.steps |= {system: int(count) for system, count in given.items()}
    asked.every = dict.fromkeys(EVERY, 10) if asked.tiny else EVERY
    asked.setting = TINY if asked.tiny else SHAPE
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    return asked


def plan(asked: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """The runs: a name, the system, and fields of our job."""
    if asked.ablate:
        wanted = [name.strip() for name in asked.ablate.split(",")]
        without = [(f"without {name}", "ours", ABLATIONS[name]) for name in wanted]
        return [("ours", "ours", []), *without]
    if asked.sweep:
        field, values = asked.sweep.split("=", 1)
        return [(f"ours, {field}={value}", "ours", [f"{field}={value}"]) for value in values.split(",")]
    return [(name, name, []) for name in asked.systems.split(",")]


def prepared(asked: argparse.Namespace) -> tuple[Path, float]:
    """The folder of `data prepare`, made once, and how long that took now."""
    began = time.monotonic()
    words = [sys.executable, "-m", "meshwright", "data", "prepare"]
    if asked.tiny:
        out = asked.out.parent / "speedrun-tiny"
        given = [
            str(HERE.parent / "docs" / "playbook"),
            "--vocab-size",
            str(TINY.vocab_size),
            "--validation-fraction",
            "0.1",
        ]
    else:
        folder = asked.corpus.with_name(asked.corpus.name.removesuffix(".tar.xz"))
        out = folder / "tokens"
        given = [str(folder / "text.jsonl"), "--tokenizer", str(folder / "tokenizer.json")]
        given += ["--validation-fraction", "0.02"]
        if not (folder / "facts.json").exists():
            with tarfile.open(asked.corpus) as tar:
                tar.extractall(folder, filter="data")
    if not out.exists():
        subprocess.run([*words, *given, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    return out, time.monotonic() - began


def one(system: str, fields: list[str], text: Path, asked: argparse.Namespace, folder: Path, left: float) -> Row:
    """One run's row: its curve in seconds and loss, or why it failed."""
    began = time.monotonic()
    try:
        with gpu_readings() as gpu:
            if system in ("ours", "gpt2"):
                found = trained(system, job_fields(system, fields, text, asked), folder, left)
            else:
                found = peer(system, text, asked, folder, left)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished within --limit-s, {asked.limit_s:.0f} s in all"}
    if "failed" in found:
        return found
    found |= timed(found["marks"], found["losses"])
    return found | {"gpu": gpu, "wall_s": round(time.monotonic() - began, 1)}


def job_fields(system: str, fields: list[str], text: Path, asked: argparse.Namespace) -> list[str]:
    """The fields of our job, of either recipe."""
    given = [*BATCH, *COMMON, *(GPT2 if system == "gpt2" else []), f"model.vocab_size={asked.setting.vocab_size}"]
    if asked.tiny:
        given += TINY_FIELDS
    schedule = [f"run.steps={asked.steps[system]}", f"evaluation.every_steps={asked.every[system]}"]
    if system == "ours":
        schedule += [f"schedule.decay_steps={asked.steps[system] * 2 // 3}"]
    data = [f"data.sources={json.dumps([str(text.resolve())])}", f"run.seed={asked.seed}", "checkpoint.every_steps=0"]
    return [*given, *schedule, *data, *fields, *(asked.set if system == "ours" else [])]


def trained(system: str, fields: list[str], folder: Path, left: float) -> Row:
    """A run of our trainer, as its own files tell it."""
    run, job = folder / "run", "speedrun-124m"
    if system == "gpt2":
        (folder / "gpt2.toml").write_text("")
        job = str(folder / "gpt2.toml")
    words = [sys.executable, "-m", "meshwright", "train", job, "--quiet"]
    for field in (*fields, f"run.folder={json.dumps(str(run))}"):
        words += ["--set", field]
    shutil.rmtree(run, ignore_errors=True)
    done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, left), check=False)
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    rows = lines(run / "metrics.jsonl")
    start = next(event for event in lines(run / "events.jsonl") if event.get("event", event.get("kind")) == "start")
    steps = [row for row in rows if "step_s" in row]
    losses = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row and row["step"]]
    ends = sorted({SETTLE, *(step for step, _ in losses)})
    marks = [
        (end, sum(row["step_s"] for row in steps if begin < row["step"] <= end))
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    return {"marks": marks, "losses": losses, "parameters": start["parameters"], "device": start["device"]}


def peer(system: str, text: Path, asked: argparse.Namespace, folder: Path, left: float) -> Row:
    """A peer's run; it gets its sequences from a file."""
    tokens, result = folder / f"tokens-{asked.steps[system]}.npz", folder / "peer.json"
    began = time.monotonic()
    if not tokens.exists():
        write_tokens(tokens, text, asked, asked.steps[system])
    gathered_s = time.monotonic() - began
    request = {
        "setting": asdict(asked.setting),
        "steps": asked.steps[system],
        "every": asked.every[system],
        "settle": SETTLE,
        "seed": asked.seed,
        "tokens": str(tokens),
    }
    script = HERE / "peers" / f"{system}_speedrun.py"
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(request), str(result)],
        capture_output=True,
        text=True,
        timeout=max(1.0, left - gathered_s),
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        check=False,
    )
    if not result.exists():
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        skipped = last[0].startswith(("skipped:", "ModuleNotFoundError"))
        return ({"skipped": last[0]} if skipped else {"failed": done.stderr[-1500:]}) | {"marks": [], "losses": []}
    return json.loads(result.read_text(encoding="utf-8")) | {"gathered_s": gathered_s}


def write_tokens(path: Path, text: Path, asked: argparse.Namespace, steps: int) -> None:
    """The sequences that our GPT-2 recipe trains on, in its order, and the held-out ones."""
    import numpy as np

    import meshwright
    from meshwright.train.feed import held_out_batches, open_corpus

    empty = path.with_suffix(".toml")
    empty.write_text("")
    job = meshwright.load_job(str(empty), job_fields("gpt2", [], text, asked))

    def with_last_label(batch: Any) -> Any:
        return np.concatenate([batch.tokens_BS.numpy(), batch.labels_BS[:, -1:].numpy()], axis=1).astype(np.int32)

    loader = iter(meshwright.data.loader(job))
    train = [with_last_label(next(loader).batch) for _ in range(steps)]
    held_out = [with_last_label(batch) for batch in held_out_batches(job, open_corpus(job))]
    np.savez(path, train=np.concatenate(train), held_out=np.concatenate(held_out))


def timed(marks: list[Any], losses: list[Any]) -> Row:
    """(seconds, loss) after each evaluation; the first steps count as long as the others on average."""
    if not losses:
        return {"curve": []}
    ends = [end for end, _ in marks]
    steady_s = sum(seconds for end, seconds in marks if end > SETTLE) / (ends[-1] - SETTLE)
    first_s = next(seconds for end, seconds in marks if end == SETTLE)
    curve = []
    for step, loss in losses:
        after = sum(seconds for end, seconds in marks if SETTLE < end <= step)
        curve.append((steady_s * min(step, SETTLE) + after, loss))
    return {"curve": curve, "step_s": steady_s, "compile_s": first_s - SETTLE * steady_s}


def table(rows: list[Row], target: float | None) -> str:
    """Seconds to the target by run, over seeds, next to ours."""
    good = [row for row in rows if row.get("curve")]
    if not good:
        return "no run has finished"
    names = list(dict.fromkeys(row["run"] for row in good))
    best = {name: max(min(loss for _, loss in row["curve"]) for row in good if row["run"] == name) for name in names}
    target = target if target is not None else max(best.values())
    said = [f"target: held-out loss {target:.4f}", ""]
    said += ["| run | seeds | seconds to the target | of ours | best loss | s/step |", "|---|---|---|---|---|---|"]
    reached = {
        name: [reach(row["curve"], target) for row in good if row["run"] == name and reach(row["curve"], target)]
        for name in names
    }
    for name in names:
        own = [row for row in good if row["run"] == name]
        missing = len(own) - len(reached[name])
        seconds = f"{statistics.median(reached[name]):.1f}" if reached[name] else "not reached"
        seconds += f" ({missing} of {len(own)} not reached)" if missing and reached[name] else ""
        ours = reached.get("ours")
        ratio = f"{statistics.median(reached[name]) / statistics.median(ours):.2f}" if ours and reached[name] else ""
        losses = statistics.median(min(loss for _, loss in row["curve"]) for row in own)
        step_s = statistics.median(row["step_s"] for row in own)
        seeds = " ".join(str(row["seed"]) for row in own)
        said.append(f"| {name} | {seeds} | {seconds} | {ratio} | {losses:.4f} | {step_s:.4f} |")
    return "\n".join(said)


def reach(curve: list[Any], target: float) -> float | None:
    """Seconds of the first evaluation at or below the target."""
    return next((seconds for seconds, loss in curve if loss <= target), None)


def lines(path: Path) -> list[Row]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
