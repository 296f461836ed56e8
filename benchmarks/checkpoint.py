"""What a checkpoint costs training, compared with `torch.save` of the same state.

    python benchmarks/checkpoint.py [--job pretrain-1b] [--set F=V …] [--folder DIR] [--saves N] [--every N] [--out F]
    python benchmarks/checkpoint.py --job demo --set run.device=cpu

One process trains the job and saves every few steps, as `meshwright train` does: training pauses while the state
is copied into host memory (pause), then a thread hashes, writes and syncs it (write). The host's
buffers are allocated and page-locked in a thread after the first step: the slowest steps before the first save are
reported, too. Where a save is due before the last is written, training waits
for that one too (waited): --every avoids this. The step right after each save started is
compared with the others. Then the same state goes through `torch.save` and fsync, during which nothing trains, and the
last checkpoint is verified and loaded. GB/s is the checkpoint's size over the seconds; disks differ: name yours.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Lease, Saver, newest
from meshwright.data import prepare
from meshwright.job import load_job
from meshwright.parallel import World, build, host_buffer
from meshwright.train import choose_device, device_name, make_trainer, prepare_device, states_of


class Recorder:
    """Rows and events with the time they came."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append({**row, "at": time.perf_counter()})

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields, "at": time.perf_counter()})
        print(f"{time.strftime('%H:%M:%S')} {kind} {fields}", flush=True)

    def sample(self, step: int, text: str) -> None: ...

    def step(self, row: dict[str, Any]) -> None: ...

    def evaluation(self, step: int, val_loss: float) -> None: ...

    def message(self, text: str) -> None:
        print(text)


def measure(job_name: str, overrides: list[str], folder: Path, saves: int, every: int) -> dict[str, Any]:
    steps = saves * every + every
    settings = [f"run.steps={steps}", f"checkpoint.every_steps={every}", "checkpoint.keep_last=1"]
    job = load_job(job_name, [*overrides, *settings, "evaluation.every_steps=0"]).job
    device = choose_device(job)
    prepare_device(job, device)
    world, recorder, run = World(device), Recorder(), folder / "run"
    engine, weights = build(job, world)
    corpus = prepare(job.data, job.model.vocab_size)
    training = make_trainer(job, corpus, engine, weights, recorder, recorder, world)
    buffers = lambda size: host_buffer(size, torch.uint8, device)  # noqa: E731
    saver = Saver(job, Lease.claim(run), recorder.event, recorder.message, buffers)
    training.saver = saver
    training.run()

    saved = [event for event in recorder.events if event["kind"] == "checkpoint"]
    during, between = split(recorder.rows, [event["step"] for event in saved])
    plain = [torch_save(training, folder / "plain.pt") for _ in range(2)]
    loading = time.perf_counter()
    checkpoint = newest(run)
    checkpoint.verify()
    verified = time.perf_counter()
    training.resume(checkpoint)
    size = saved[-1]["bytes"]
    write_s = statistics.median(event["write_s"] for event in saved[1:])
    return {
        "job": job_name,
        "overrides": overrides,
        "device": device_name(device),
        "bytes": size,
        "saves": len(saved),
        "first_pause_s": saved[0]["pause_s"],
        "pause_s_min_median_max": [
            round(f(event["pause_s"] for event in saved[1:]), 4) for f in (min, statistics.median, max)
        ],
        "waited_s": [event["waited_s"] for event in saved],
        "write_s": round(write_s, 3),
        "gb_per_s": round(size / write_s / 1e9, 3),
        "slowest_steps_before_the_first_save_s": sorted(before_first(recorder.rows, saved[0]["step"]))[-3:],
        "step_s_otherwise": round(statistics.median(between), 4),
        "step_s_after_a_save_began": round(statistics.median(during), 4),
        "torch_save_s": [round(seconds, 3) for seconds in plain],
        "torch_save_gb_per_s": round(size / min(plain) / 1e9, 3),
        "verify_s": round(verified - loading, 3),
        "load_s": round(time.perf_counter() - verified, 3),
    }


def before_first(rows: list[dict[str, Any]], saved: int) -> list[float]:
    """Step times up to the first save, without those of the first two steps."""
    return [round(row["step_s"], 4) for row in rows if 2 < row["step"] <= saved]


def split(rows: list[dict[str, Any]], saved: list[int]) -> tuple[list[float], list[float]]:
    """Step times right after a save started, and those of the other steps; the first steps are not counted."""
    timed = [row for row in rows if row["step"] > 2]
    during = [row["step_s"] for row in timed if row["step"] - 1 in saved]
    return during, [row["step_s"] for row in timed if row["step"] - 1 not in saved]


def torch_save(training: Any, path: Path) -> float:
    """Seconds for which training would pause with `torch.save`."""
    masters = training.weights.masters
    began = time.perf_counter()
    state = {"model": dict(masters), "optimizer": states_of(training.optimizer, masters)}
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="pretrain-1b")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the system's temporary one")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=12, help="steps between saves: more than a save takes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=given.folder))
    try:
        result = measure(given.job, given.overrides, folder, given.saves, given.every)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=2))
    if given.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "results": [result]}
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
