"""How fast `meshwright data prepare` is compared with the bare tokenizer, and how much memory it takes.

    python benchmarks/data.py [--megabytes 16] [--rounds 3] [--out FILE]

Throughput: JSONL of the Python standard library's sources, a 32k byte-level BPE. "Raw" is `tokenizers`' encode_batch on
texts already in memory, its own threads on every core; "prepare" is the whole call: list, read, parse,
tokenise, write, hash, sync. Both run in fresh processes, alternating, so that a busy machine slows both; the figure is
the median of the rounds. CPU seconds are those of all processes and threads, children included.

Memory: the peak of the sum over all processes of their proportional set size (shared pages counted once), sampled every
20 ms, for the input once and eight times as large, the same tokenizer given.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

WIDE = 8
UNIT_BYTES = 2 << 20
"""So that small inputs have units for every core too."""


def write_corpus(path: Path, size_bytes: int, seed: int) -> None:
    """Documents of the standard library in a random order, as often as needed."""
    texts = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in source.parts and source.stat().st_size:
            try:
                texts.append(source.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    chance = random.Random(seed)
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < size_bytes:
            text = chance.choice(texts)
            # Repeated documents would be answered from the tokenizer's cache of words more than real text is.
            text = "".join(
                word if chance.random() > 0.05 else f"{word}{chance.randrange(10_000)}" for word in text.split(" ")
            )
            written += stream.write(json.dumps({"text": text}) + "\n")


# ---- what runs in separate processes ----


def raw(source: str, tokenizer: str) -> dict[str, float]:
    """The bare library over texts in memory."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(tokenizer)
    texts = [json.loads(line)["text"] for line in Path(source).read_text(encoding="utf-8").splitlines()]
    size_bytes = sum(len(text.encode()) for text in texts)
    started, before = time.perf_counter(), cpu_s()
    for first in range(0, len(texts), 512):
        encoder.encode_batch(texts[first : first + 512], add_special_tokens=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_s": cpu_s() - before, "mb_per_s": size_bytes / seconds / 1e6}


def prepare(source: str, tokenizer: str) -> dict[str, float]:
    """The whole of `meshwright data prepare`, without starting the interpreter."""
    from meshwright.data.prepared import Wishes, build

    with tempfile.TemporaryDirectory() as folder:
        started, before = time.perf_counter(), cpu_s()
        manifest = build(Wishes((source,), Path(tokenizer)), Path(folder) / "out", unit_bytes=UNIT_BYTES)
        seconds = time.perf_counter() - started
    size_bytes = sum(manifest.text_bytes.values())
    return {"seconds": seconds, "cpu_s": cpu_s() - before, "mb_per_s": size_bytes / seconds / 1e6}


def cpu_s() -> float:
    """Of this process and its finished children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


# ---- the two measurements ----


def alone(what: str, *arguments: str) -> dict[str, float]:
    """Run one of the above in a fresh process."""
    command = [sys.executable, __file__, "--only", what, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def peak_bytes(source: str, tokenizer: str) -> int:
    """The most memory that preparing took at any moment, all its processes together."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--only", "prepare", source, tokenizer], stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(proportional_bytes(pid) for pid in family(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"preparing {source} failed")
    return peak


def family(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in family(int(child)))]


def proportional_bytes(pid: int) -> int:
    """What a process holds, pages shared with others counted by their share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    """Both measurements, as one result."""
    from meshwright.data.prepared.build import available_cores
    from meshwright.data.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        once, wide, tokenizer = (str(Path(folder) / name) for name in ("once.jsonl", "wide.jsonl", "tokenizer.json"))
        write_corpus(Path(once), megabytes * 1_000_000, seed=1)
        write_corpus(Path(wide), WIDE * megabytes * 1_000_000, seed=2)
        train_tokenizer(
            (json.loads(line)["text"] for line in Path(once).read_text(encoding="utf-8").splitlines()), 32768
        ).save(Path(tokenizer))
        timed = [(alone("raw", once, tokenizer), alone("prepare", once, tokenizer)) for _ in range(rounds)]
        peaks = {name: peak_bytes(path, tokenizer) for name, path in (("once", once), ("eightfold", wide))}
    speed = {
        name: {key: statistics.median(turn[place][key] for turn in timed) for key in ("mb_per_s", "cpu_s", "seconds")}
        for place, name in enumerate(("raw", "prepare"))
    }
    return {
        "cores": available_cores(),
        "megabytes": megabytes,
        "rounds": [{"raw": raw_turn, "prepare": turn} for raw_turn, turn in timed],
        "throughput": speed,
        "ratio": speed["prepare"]["mb_per_s"] / speed["raw"]["mb_per_s"],
        "cpu_ratio": speed["raw"]["cpu_s"] / speed["prepare"]["cpu_s"],
        "peak_bytes": peaks,
        "memory_growth": peaks["eightfold"] / peaks["once"],
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs=3, metavar=("WHAT", "SOURCE", "TOKENIZER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        what, *arguments = given.only
        print(json.dumps({"raw": raw, "prepare": prepare}[what](*arguments)))
        return
    result = measure(given.megabytes, given.rounds)
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
