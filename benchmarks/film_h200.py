"""Trains a model on films, decoded on the GPU and by data workers: tokens per second, and how much of a step waits.

python benchmarks/film_h200.py --make films.tar [--films 8] [--frames 90]     # on a machine with PyAV
python benchmarks/film_h200.py --tar films.tar [--steps 40] [--workers 14] [--set model.layers=8] [--out FILE]

Films are H.264 of 1280 × 720; a sample is one of them, 8 frames of 224 × 224, and a sentence. The same tar is read
again and again, and every film decoded anew. The model is a decoder with Llama 3.2 1B's shape and a SigLIP encoder of
12 blocks, all of it trained, bf16, compiled, in sequences of 2,048 tokens, 8 a step. Three runs of so many steps, of
which the first ten do not count: items decoded by NVDEC (`data.decode = "gpu"`), by data workers, and noise that is
made in no time, which is what the step takes if nothing is decoded. Shares are seconds waited for data over seconds of
the steps.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

JOB = """
[model]
preset = "llama-3.2-1b"
vocab_size = 4096
[model.vision]
kind = "siglip"
image_size = 224
patch = 16
width = 768
layers = 12
heads = 12
images = 8
image_token = 1
[batch]
sequence_length = 2048
global_batch = 8
micro_batch = 8
[precision]
compute = "bf16"
[run]
compile = true
[schedule]
warmup_steps = 5
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 0
"""
FIELDS = """
[data]
sources = ["{tar}"]
cache = "{cache}"
packing = "none"
validation_fraction = 0.0
[data.fields.video]
kind = "video"
size = 224
tokens = 196
frames = 8
"""
FIRST = 10
"""Steps that do not count: the blocks are compiled, the workers start."""


def make(path: Path, films: int, frames: int) -> None:
    """A tar of short films with a sentence each."""
    import decode_h200

    decode_h200.LENGTH = frames
    with tarfile.open(path, "w") as tar:
        for number in range(films):
            for name, raw in (("mkv", decode_h200.h264(number)), ("txt", f"Film {number} of a moving scene.".encode())):
                member = tarfile.TarInfo(f"{number:04d}.{name}")
                member.size = len(raw)
                tar.addfile(member, io.BytesIO(raw))
    print(f"{path}: {films} films of {frames} frames, {path.stat().st_size:,} bytes")


def trained(folder: Path, name: str, job: str, settings: list[str]) -> dict[str, float]:
    """What a run's steps took after the first ones."""
    file, run = folder / f"{name}.toml", folder / name
    file.write_text(job)
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--set", f"run.folder={run}"]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)  # its checkpoint
    counted = [row for row in rows if row["step"] > FIRST]
    seconds = sum(row["step_s"] for row in counted)
    return {
        "steps": len(counted),
        "step_ms": 1000 * seconds / len(counted),
        "tokens_per_s": sum(row["tokens_per_s"] * row["step_s"] for row in counted) / seconds,
        "data_wait_share": sum(row["data_wait_s"] for row in counted) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--films", type=int, default=8)
    parser.add_argument("--frames", type=int, default=90)
    parser.add_argument("--tar", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.make:
        make(asked.make, asked.films, asked.frames)
        return
    results: dict[str, Any] = {"date": str(date.today()), "cores": os.cpu_count(), "tar": asked.tar.name}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        films = FIELDS.format(tar=asked.tar.absolute(), cache=folder / "cache")
        common = [f"run.steps={FIRST + asked.steps}", f"data.workers={asked.workers}", *asked.settings]
        for name, job, settings in (
            ("noise", JOB + '\n[data]\nsources = ["builtin:synthetic"]\n', []),
            ("gpu", JOB + films, ["data.decode=gpu", "data.workers=2"]),
            ("cpu", JOB + films, ["data.decode=cpu"]),
        ):
            try:
                results[name] = trained(folder, name, job, common + settings)
            except subprocess.CalledProcessError as error:
                print(f"{name}: failed with exit code {error.returncode}", flush=True)
                continue
            found = results[name]
            print(
                f"{name:6} {found['step_ms']:8.1f} ms a step {found['tokens_per_s']:10,.0f} tokens/s, waits for data "
                f"{100 * found['data_wait_share']:.2f}% of the time",
                flush=True,
            )
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
