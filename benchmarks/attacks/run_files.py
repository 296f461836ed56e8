"""A stranger's run folder: its files damaged, then read with everything that reads run folders."""

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, InternalError, command
from attacks.damage import damage_file
from attacks.requests import fetch
from attacks.small_run import copy_run, finished_run

FILES = ["metrics.jsonl", "events.jsonl", "memory.jsonl"] * 3
FILES += [
    "job.resolved.json",
    "job.resolved.json",
    "environment.json",
    "code.json",
    "job.toml",
    "samples/step-00000003.txt",
]
FILES += [
    "attempts/0.json",
    "slurm/submission.json",
    "slurm/over",
    "slurm/verdict.json",
    "logs/rank-0.err",
    "report.html",
]
FILES += ["code.diff", "tokenizer.json", "samples/step-999999999999999999999.txt", ".report.html.new"]
COMMANDS = [
    ("report", "run"),
    ("status", "run"),
    ("status", "run", "--json"),
    ("status", "--all", "."),
    ("logs", "run"),
]
COMMANDS += [("logs", "run", "--rank", "0", "--json"), ("checkpoint", "list", "run"), ("job", "show", "run")]
COMMANDS += [
    ("generate", "run", "--tokens", "1"),
    ("replay", "run", "--step", "99"),
    ("eval", "run"),
    ("report", "run", "--json"),
]
COMMANDS += [("checkpoint", "restore", "run"), ("cancel", "run")]
ADDRESSES = [
    "/api/runs",
    "/api/run?run=run",
    "/api/curves?run=run",
    "/api/curves?run=run&run=other&x=time",
    "/api/runs",
]
ADDRESSES += ["/api/log?run=run&log=rank-0.err", "/api/curves?run=run&x=tokens", "/api/run?run=run"]
SUBMISSION = '{"site": "x", "jobs": ["17"], "nodes": 1, "ranks_per_node": 1, "chain": 1, "time": "1:00", "ladder": []}'


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of damaged run folders."""
    finished_run()
    number = 0
    while True:
        number += 1
        files = sorted({chance.choice(FILES) for _ in range(chance.choice((1, 1, 1, 2, 4)))})
        # Half of the reads are the studio's and the report's: these show what others wrote.
        look = "studio" if (what := chance.random()) < 0.35 else "report run" if what < 0.5 else None
        words = chance.choice(COMMANDS) if look is None else ("report", "run")
        seed = chance.getrandbits(32)
        name = f"{number}: {', '.join(files)} · {look or ' '.join(words)}"
        yield Case(name, partial(_run, seed, files, words, look == "studio"), seconds=30.0, memory_gib=1.0)


def _run(seed: int, files: list[str], words: tuple[str, ...], studio: bool, folder: Path) -> None:
    chance, run = random.Random(seed), copy_run(folder / "run")
    for name in files:
        path = run / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(SUBMISSION if name.endswith("submission.json") else '{"go": true, "why": "x"}\n')
        damage_file(path, chance)
    if not studio:
        command(*words)
        return
    from meshwright.studio import Studio

    server = Studio(folder)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for address in (*chance.sample(ADDRESSES, 4), "/api/runs"):
        status, text = fetch(server.guard.port, address)
        if status >= 500 or (address == "/api/runs" and status != 200):
            raise InternalError(f"{address}: {status} {text[:2000]}")


RUN_FILES = Family("run files", draw)
