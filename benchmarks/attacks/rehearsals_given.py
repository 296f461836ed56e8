"""A stranger's rehearsal: its `rehearsal.json` damaged, then read with everything that reads rehearsals."""

import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from attacks.case import Case, Family, InternalError, command
from attacks.damage import damage_file
from attacks.requests import fetch

COMMANDS = [
    ("plan", "--check", "run", "--cluster", "4xh200", "--json"),
    ("plan", "--check", "run", "--cluster", "4xh200"),
    ("report", "run", "--out", "page.html"),
    ("status", "run"),
    ("status", "run", "--json"),
    ("train", "run", "--resume"),
]
ADDRESSES = ["/api/runs", "/api/run?run=run", "/api/curves?run=run"]
TESTS = Path(__file__).parents[2] / "tests"


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of damaged rehearsals; every fourth is shown by the studio."""
    number = 0
    while True:
        number += 1
        words = None if chance.random() < 0.25 else chance.choice(COMMANDS)
        short, seed = chance.random() < 0.3, chance.getrandbits(32)
        name = f"{number}: {'a rank out of memory' if short else 'all measured'} · {' '.join(words or ('studio',))}"
        yield Case(name, partial(_run, seed, words, short), seconds=30.0, memory_gib=1.0)


def _run(seed: int, words: tuple[str, ...] | None, short: bool, folder: Path) -> None:
    sys.path.insert(0, str(TESTS))
    from rehearsals import SHORT, WHOLE, saved

    # Of this torch, or a plan would not use it.
    run = saved(folder / "run", replace(SHORT if short else WHOLE, torch=version("torch")))
    damage_file(run / "rehearsal.json", random.Random(seed))
    if words is not None:
        command(*words)
        return
    from meshwright.studio import Studio

    server = Studio(folder)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for address in ADDRESSES:
        status, text = fetch(server.guard.port, address)
        if status >= 500 or (address == "/api/runs" and status != 200):
            raise InternalError(f"{address}: {status} {text[:2000]}")


REHEARSALS = Family("rehearsals", draw)
