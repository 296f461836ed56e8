"""Checkpoints whose files were damaged: found and refused, or an older one used, and never other numbers."""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, LostSteps, command
from attacks.damage import damage_file, damage_json
from attacks.small_run import RESUMED_FROM, STEPS, copy_run, finished_run

LOOKS = ["verify", "verify", "list", "show", "diff", "prune", "generate", "resume"]


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of damaged checkpoints."""
    number, saved = 0, finished_run() / "checkpoints"
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    while True:
        number += 1
        look, name = chance.choice(LOOKS), chance.choice(names)
        kind = chance.choice(("damaged", "damaged", "resealed", "moved"))
        seed = chance.getrandbits(32)
        yield Case(f"{number}: {name} {kind} · {look}", partial(_run, seed, name, kind, look), seconds=60.0)


def _run(seed: int, name: str, kind: str, look: str, folder: Path) -> None:
    chance, run = random.Random(seed), copy_run(folder / "run", checkpoints=True)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    step = f"step-{chance.choice((2, RESUMED_FROM)):08d}"
    path = run / "checkpoints" / step / Path(name).name
    before = _digest(path)
    if kind == "damaged":
        damage_file(path, chance)
    elif kind == "moved":
        other = run / "checkpoints" / f"step-{chance.choice((3, 5, 99)):08d}"
        (run / "checkpoints" / step).rename(other)
    else:
        _reseal(chance, path.parent)
    if look == "resume":
        _resume(run, honest=kind != "resealed")
        return
    words = {"diff": ("diff", "run", f"run/checkpoints/{step}"), "prune": ("prune", "run", "--damaged", "--dry-run")}
    if look == "generate":
        command("generate", "run", "--tokens", "1")
        return
    told = command("checkpoint", *words.get(look, (look, "run")), "--json")
    if look == "verify" and kind == "damaged" and _digest(path) != before and json.loads(told)["ok"]:
        raise LostSteps(f"{path} was damaged, but checkpoint verify found nothing")


def _resume(run: Path, honest: bool) -> None:
    """The run repeated to its end gives the same numbers, whichever checkpoint it could start from."""
    command("train", str(run), "--resume")
    if honest and (found := _losses(run)) != _reference():
        raise LostSteps(f"the run ended with {found}, but without interference with {_reference()}")


@cache
def _reference() -> dict[int, Any]:
    return _losses(finished_run())


def _losses(run: Path) -> dict[int, Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def _reseal(chance: random.Random, checkpoint: Path) -> None:
    """Damage an index, a job or a manifest as an attacker would who can also compute hashes."""
    from meshwright.checkpoint.records import Manifest
    from meshwright.checkpoint.shares import seal_of

    name = chance.choice(("index.json", "index.json", "job.json", "manifest.json"))
    _, data = damage_json((checkpoint / name).read_bytes(), chance)
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes()) if name != "manifest.json" else None
    if isinstance(manifest, dict):
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["seal"] = seal_of(Manifest.model_validate_json(json.dumps(manifest)))
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else None


CHECKPOINT_FILES = Family("checkpoint files", draw, weight=0.5)
