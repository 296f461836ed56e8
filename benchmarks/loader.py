"""How many tokens a second one worker process delivers from prepared data, in every packing.

python benchmarks/loader.py [--tokens 50000000] [--seconds 3] [--out benchmarks/results/loader.json]

The tokens are prepared in files first (documents of log-normal length, two sources), then read by the loader that
training uses, with one worker process and nothing else running; what is counted are the places of the batches that the
training process received. The read-ahead of the worker fills up before the clock starts, and what it held then is not
counted. Where other programs share the cores, the rate per second of the worker's own processor time shows what a
dedicated core would give.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data import Corpus, Loader, training_stream
from meshwright.data.store import FileTokens, TokenWriter, token_dtype
from meshwright.job.data import Data

SEQUENCE, GLOBAL_BATCH, PREFETCH = 4096, 32, 4
CASES: dict[str, dict[str, Any]] = {
    "concatenate": {},
    "concatenate, documents masked": {"mask_documents": True},
    "concatenate, blended 70/30": {"weights": (0.7, 0.3)},
    "best-fit, documents masked": {"packing": "best-fit", "mask_documents": True},
    "none, documents masked": {"packing": "none", "mask_documents": True},
}


def write_corpus(folder: Path, tokens: int) -> Corpus:
    """Token files as preparation writes them."""
    generator = np.random.default_rng(0)
    writer = TokenWriter(folder, "train", token_dtype(50_000))
    bounds = [0]
    for share in (0.7, 0.3):
        target = writer.count + int(tokens * share)
        while writer.count < target:
            writer.begin_document()
            writer.append(generator.integers(0, 50_000, int(generator.lognormal(6.5, 1.0)) + 2))
        bounds.append(writer.count)
    writer.finish()
    store = FileTokens(folder, "train", writer.count, token_dtype(50_000).str)
    return Corpus(None, store, store, folder, tuple(bounds))


def measure(corpus: Corpus, fields: dict[str, Any], seconds: float) -> dict[str, float]:
    """Tokens per second of one worker, by wall time and by its own CPU time."""
    data = Data(sources=("a", "b"), **fields)
    stream = training_stream(corpus, data, SEQUENCE, seed=0)
    loader = Loader(stream, global_batch=GLOBAL_BATCH, workers=1, prefetch=PREFETCH)
    for _ in range(4 * PREFETCH):
        next(loader)
    [worker] = multiprocessing.active_children()
    steps, started, used_s = 0, time.perf_counter(), processor_time_s(worker.pid)
    while time.perf_counter() - started < seconds:
        next(loader)
        steps += 1
    elapsed_s, busy_s = time.perf_counter() - started, processor_time_s(worker.pid) - used_s
    loader.close()
    # What was ready when the clock started was not produced in the counted time.
    tokens = (steps - PREFETCH) * GLOBAL_BATCH * SEQUENCE
    return {"wall": tokens / elapsed_s, "worker_processor_time": tokens / busy_s}


def processor_time_s(pid: int | None) -> float:
    """CPU time a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = write_corpus(Path(scratch), options.tokens)
        results = {name: measure(corpus, fields, options.seconds) for name, fields in CASES.items()}
    for name, rates in results.items():
        told = " · ".join(f"{rate / 1e6:6.1f} M tokens/s of {kind.replace('_', ' ')}" for kind, rate in rates.items())
        sys.stdout.write(f"{name:32} {told}\n")
    if options.out:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        settings = {"sequence_length": SEQUENCE, "global_batch": GLOBAL_BATCH, "tokens": options.tokens}
        options.out.write_text(json.dumps(machine | settings | {"tokens_per_s": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
