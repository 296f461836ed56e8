"""`train` next to `bench` on the same real text, with the GPU's clock and power, and what the first checkpoint costs.

    python benchmarks/real_text.py [--text FOLDER] [--repeats N] [--out FILE]
    python benchmarks/real_text.py --small           # the demo's model on a CPU: shows that it runs

Each run is a process of its own, in turn: `bench` on random tokens, `bench` on the text, `train` on the text with a
checkpoint in the middle and at the end; pretrain-1b (tied, S 4096, micro-batch 8, bf16, compiled). --text is a folder
of `meshwright data prepare`; without it Python's own library is prepared first. Steps are compared by their medians
after --warmup; for `train` the steps during which a checkpoint was taken or written are counted apart, and its rate is
given by thirds, since it may fall. "in all" is tokens over the time from the end of the warm-up to the end of the last
step, pauses included. Clock, power and temperature are medians of nvidia-smi's readings every half second while
the GPU is at least 90% busy. --out is rewritten after every run.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_readings import gpu_readings

STEP_FIELDS = ("step", "step_s", "data_wait_s", "gpu_clock_mhz", "gpu_power_w")
LIMIT_S = 400
VOCABULARY = 16384
Row = dict[str, Any]


def main() -> None:
    """Run in turn, print as results come, then the ratios."""
    asked = parse()
    print(__doc__)
    results: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = asked.text or prepared(folder)
        for repeat in range(asked.repeats):
            for name, measure in (("bench, random", bench), ("bench, text", bench), ("train, text", train)):
                source = "builtin:synthetic" if "random" in name else str(text.resolve())
                began = time.monotonic()
                with gpu_readings() as found:
                    row = measure([f"data.sources={json.dumps([source])}"], asked, folder)
                row |= {"wall_s": round(time.monotonic() - began, 1), "gpu": found}
                results.append({"run": name, "repeat": repeat, **row})
                print(json.dumps({key: value for key, value in results[-1].items() if key != "steps"}), flush=True)
                if asked.out:
                    asked.out.write_text(json.dumps(report(results, asked), indent=1) + "\n", encoding="utf-8")
    for sentence in compared(results):
        print(sentence)
    sys.exit(any("failed" in row for row in results))


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a folder of meshwright data prepare")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="of train; bench times as many less the warm-up")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the job")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file")
    asked = parser.parse_args()
    asked.job = "demo" if asked.small else "pretrain-1b"
    if asked.small:
        model = [f"model.vocab_size={VOCABULARY}", "model.layers=1"]
        batch = ["batch.sequence_length=64", "batch.global_batch=2", "batch.micro_batch=2"]
        asked.set += ['run.device="cpu"', *model, *batch]
        asked.steps, asked.warmup = 8, 2
    return asked


def prepared(folder: Path) -> Path:
    """Python's library as tokens."""
    out = folder / "text"
    words = ["data", "prepare", "builtin:stdlib", "--vocab-size", str(VOCABULARY), "--out", str(out)]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "meshwright", *words], check=True)
    print(f"prepared in {time.monotonic() - began:.1f} s", flush=True)
    return out


def command(asked: argparse.Namespace, verb: str, fields: list[str]) -> list[str]:
    """A meshwright command with the job's fields."""
    sets = [word for field in (*fields, *asked.set, "evaluation.every_steps=0") for word in ("--set", field)]
    return [sys.executable, "-m", "meshwright", verb, asked.job, *sets]


def bench(fields: list[str], asked: argparse.Namespace, folder: Path) -> Row:
    """What `bench` says of the job."""
    counts = ["--steps", str(asked.steps - asked.warmup), "--warmup", str(asked.warmup), "--json"]
    done = subprocess.run(
        [*command(asked, "bench", fields), *counts], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    said = json.loads(done.stdout)
    tokens = said["tokens_per_step"]
    return {
        "device": said["device"],
        "torch": said["torch"],
        "tokens_per_s": said["tokens_per_s"],
        "in_all_tokens_per_s": tokens * said["steps"] / said["timed_s"],
        "first_step_s": said["first_step_s"],
        "data_wait_share": said["data_wait_share"],
        "phases_s": said["phases_s"],
        "attention": said["attention"],
        "peak_memory_bytes": said["peak_memory_bytes"],
        "loss": said["losses"][-1],
    }


def train(fields: list[str], asked: argparse.Namespace, folder: Path) -> Row:
    """What a run's own files say of it."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    middle = asked.steps // 2
    saving = [f"checkpoint.every_steps={middle}", "checkpoint.keep_last=1"]
    more = [f"run.folder={run}", f"run.steps={asked.steps}", *saving]
    words = [*command(asked, "train", [*fields, *more]), "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    rows, events = lines(run / "metrics.jsonl"), lines(run / "events.jsonl")
    shutil.rmtree(run, ignore_errors=True)
    return summary([row for row in rows if "step_s" in row], events, asked.warmup, middle)


def lines(path: Path) -> list[Row]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(rows: list[Row], events: list[Row], warmup: int, saved_after: int) -> Row:
    """A run's rates: of steps without a checkpoint, by thirds, of those after the save began, and of all."""
    timed = rows[warmup:]
    plain = [row for row in timed if row["step"] < saved_after]
    after = [row for row in timed if row["step"] > saved_after]
    third = max(1, len(timed) // 3)
    saves = [event for event in events if event.get("kind", event.get("event")) == "checkpoint"]
    pauses = [{key: save.get(key) for key in ("step", "pause_s", "waited_s", "write_s")} for save in saves]
    tokens = timed[0]["tokens_per_s"] * timed[0]["step_s"]
    span = sum(row["step_s"] for row in timed) + sum(save["pause_s"] or 0.0 for save in pauses[:1])
    return {
        "tokens_per_s": rate(plain),
        "after_the_save_tokens_per_s": rate(after),
        "thirds_tokens_per_s": [rate(timed[start : start + third]) for start in range(0, 3 * third, third)],
        "in_all_tokens_per_s": tokens * len(timed) / span,
        "first_step_s": rows[0]["step_s"],
        "data_wait_share": sum(row["data_wait_s"] for row in timed) / sum(row["step_s"] for row in timed),
        "checkpoints": pauses,
        "peak_memory_bytes": rows[-1]["memory_bytes"],
        "loss": rows[-1]["loss"],
        "steps": [{key: row.get(key) for key in STEP_FIELDS} for row in rows],
    }


def rate(rows: list[Row]) -> float | None:
    """Median tokens per second."""
    return statistics.median(row["tokens_per_s"] for row in rows) if rows else None


def compared(results: list[Row]) -> list[str]:
    """Ratios of medians over repeats."""

    def of(name: str, key: str = "tokens_per_s") -> float | None:
        values = [row[key] for row in results if row["run"] == name and row.get(key)]
        return statistics.median(values) if values else None

    sentences = []
    base = of("bench, text")
    for name, key, words in (
        ("bench, random", "tokens_per_s", "bench on random tokens"),
        ("train, text", "tokens_per_s", "train on the text, before its checkpoint"),
        ("train, text", "after_the_save_tokens_per_s", "train on the text, after it began to save"),
        ("train, text", "in_all_tokens_per_s", "train on the text, in all"),
    ):
        own = of(name, key)
        if own and base:
            sentences.append(f"{words}: {own:,.0f} tokens/s, {own / base - 1:+.2%} of bench on the text ({base:,.0f})")
    for row in results:
        for save in row.get("checkpoints", ())[:1]:
            sentences.append(f"the first checkpoint paused training for {save['pause_s']:.2f} s")
    return sentences


def report(results: list[Row], asked: argparse.Namespace) -> Row:
    """What is written."""
    fields = {"job": asked.job, "steps": asked.steps, "warmup": asked.warmup, "set": asked.set}
    when = time.strftime("%Y-%m-%d %H:%M")
    return {"date": when, "how": __doc__, **fields, "compared": compared(results), "results": results}


if __name__ == "__main__":
    main()
