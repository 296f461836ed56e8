"""Training runs whose backups go to a real object store that is killed, stopped, slow or answers wrongly.

Whatever the store does, the run ends in time with every step, and a missing backup is reported; a backup that is
complete, or reported as made, is equal to the checkpoint and can be restored.
"""

import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, InternalError, LostSteps, Refused, command
from attacks.object_store import (
    BUCKET,
    FAULTS,
    Fault,
    ObjectStore,
    client_environment,
    start_proxy,
    unavailable,
)
from attacks.tiny_run import JOB, SET, STEPS, left_alone, require_equal

TARGET = f"s3://{BUCKET}/backups"
PREFIX = "backups/run/step-"
REQUESTS = 40
"""As many requests as an undisturbed run makes."""
RESTORE_REQUESTS = 16
"""As many as a run makes that continues from a backup, before it trains."""
LIMITS_S = {
    "store": {"ANSWER_S": 3.0, "STALLED_S": 3.0, "PATIENCE_S": 3.0},
    "backup_thread": {"RETRY_S": 0.5, "LAST_S": 10.0},
}
"""The program's own limits, shortened alike, while the store is disturbed."""


def draw(chance: random.Random) -> Iterator[Case]:
    """Every kind of fault in turn, for a few requests or until the end; in one of three the run is killed, too, and its
    checkpoints are lost."""
    import s3fs  # noqa: F401  # once, and for all processes that are forked from here

    left_alone()
    while True:
        for kind in FAULTS:
            fault = Fault(kind, chance.randrange(REQUESTS), chance.choice((1, 3, 20, 100_000)))
            killed_s = chance.uniform(0.2, 3.0) if chance.random() < 0.3 else None
            name = str(fault) + (f", the run killed after {killed_s:.1f} s" if killed_s else "")
            yield Case(name, partial(_run, fault, killed_s), seconds=180.0)


def _run(fault: Fault, killed_s: float | None, folder: Path) -> None:
    store, run, copies = ObjectStore(folder / "store"), Path("run"), set[int]()
    store.start()
    words = ["train", JOB, *(word for each in (*SET, f"checkpoint.backup_to={TARGET}") for word in ("--set", each))]
    words += ["--json", "--quiet"]

    os.environ |= client_environment(start_proxy(store, fault))
    outcome = _disturbed(words, killed_s)
    if outcome is None and killed_s is not None:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        store.recover()
        copies = _complete(store.objects())
        os.environ |= client_environment(start_proxy(store, replace(fault, first=fault.first % RESTORE_REQUESTS)))
        outcome = _disturbed([*words, "--resume"])

    store.recover()
    os.environ |= client_environment(store.port)
    if outcome is None:
        outcome = _recovered([*words, "--resume"])
    require_equal(run)
    _require_true_reports(run, outcome, store.objects(), copies)

    outcome = _recovered(["train", "run", "--resume", "--json", "--quiet"])
    if outcome["backup_missing"] is not None:
        raise InternalError(f"resuming the finished run did not copy its last checkpoint: {outcome}")
    _require_restored(run)


def _disturbed(words: list[str], killed_s: float | None = None) -> dict[str, Any] | None:
    """How a run ended while its store was disturbed; None if it was killed, or refused since the store did not answer
    when it was needed: before training, or for the backup to resume from."""
    try:
        return _command(words, killed_s, LIMITS_S)
    except Refused as refusal:
        if TARGET not in str(refusal) or (Path("run").exists() and "--resume" not in words):
            raise InternalError(f"refused: {refusal}") from None
        return None


def _recovered(words: list[str]) -> dict[str, Any]:
    """What a command printed once the store answers again, which leaves no reason to refuse it."""
    try:
        outcome = _command(words)
    except Refused as refusal:
        raise InternalError(f"refused although the store answers: {refusal}") from None
    assert outcome is not None
    return outcome


def _command(
    words: list[str], killed_s: float | None = None, limits_s: dict[str, dict[str, float]] | None = None
) -> dict[str, Any] | None:
    """What a command printed as JSON, in a process that ends as a real one does: with all its threads; None if it was
    killed."""
    answer = Path("answer.json")
    answer.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_in_process, args=(words, answer, limits_s or {}))
    process.start()
    process.join(killed_s)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return None
    if process.exitcode:
        raise InternalError(f"exit {process.exitcode}: {Path('errors').read_text()[-3000:]}")
    if errors := Path("errors").read_text():
        raise InternalError(f"printed to stderr: {errors[-3000:]}")
    told: dict[str, Any] = json.loads(answer.read_text())
    if "refusal" in told:
        raise Refused(told["refusal"])
    return told


def _in_process(words: list[str], answer: Path, limits_s: dict[str, dict[str, float]]) -> None:
    for module, limits in limits_s.items():
        for name, seconds in limits.items():
            setattr(importlib.import_module(f"meshwright.checkpoint.{module}"), name, seconds)
    with Path("errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)  # of threads, too
    try:
        told = command(*words, accept=(0,))
    except Refused as refusal:
        told = json.dumps({"refusal": str(refusal)})
    answer.write_text(told)


def _complete(objects: dict[str, bytes]) -> set[int]:
    """The steps whose copies have a manifest."""
    keys = [key.removeprefix(PREFIX).split("/") for key in objects if key.startswith(PREFIX)]
    return {int(step) for step, name in keys if name == "manifest.json"}


def _require_true_reports(
    run: Path, outcome: dict[str, Any], objects: dict[str, bytes], before_resume: set[int]
) -> None:
    """What the run says of its backups is what the store has, and a run that lost its checkpoints continued from the
    newest of them."""
    from meshwright.runs import RunFolder

    events = RunFolder.open(run).events()
    copied, restored = ([event["step"] for event in events if event["kind"] == kind] for kind in ("backup", "restored"))
    complete = _complete(objects)
    for step in complete:
        local = run / "checkpoints" / f"step-{step:08d}"
        for name in json.loads(objects[f"{PREFIX}{step:08d}/manifest.json"])["files"]:
            content = objects.get(f"{PREFIX}{step:08d}/{name}")
            if content is None or (local.exists() and content != (local / name).read_bytes()):
                raise LostSteps(f"the backup of step {step} differs from the checkpoint in {name}")
    if copied and max(copied) not in complete:
        raise LostSteps(f"the backup of step {max(copied)} was reported and is not there")
    is_reported = outcome["backup_missing"] and any(event["kind"] == "backup_missing" for event in events)
    if STEPS not in complete and not is_reported:
        raise LostSteps(f"the backup of the last step is missing, and nothing says so: {outcome}")
    if bool(outcome["backup_missing"]) == (STEPS in copied):
        raise LostSteps(f"backup_missing is {outcome['backup_missing']}, but copies of {copied} were reported")
    if before_resume and restored[-1:] != [max(before_resume)]:
        raise LostSteps(f"the store had copies of {sorted(before_resume)}, but the run continued from {restored}")


def _require_restored(run: Path) -> None:
    """The newest copy restores to the checkpoint that was lost."""
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    before = {file.name: file.read_bytes() for file in last.iterdir()}
    shutil.rmtree(run / "checkpoints")
    restored = _recovered(["checkpoint", "restore", "run", "--json"])
    if {file.name: file.read_bytes() for file in last.iterdir()} != before:
        raise LostSteps(f"the restored checkpoint is not the one that was saved: {restored}")


BACKUPS = Family("backups", draw, weight=0.1, unavailable=unavailable)
