"""A store that is slow, silent or broken: training goes on, nothing piles up, and what is not copied is reported."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_states import Reports, make_saver, state_of, tiny
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.checkpoint import Lease, Saver, backups, checkpoints, require_backup, restore
from meshwright.errors import UserError
from meshwright.job import Job


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every upload waits for it: until then the store is silent."""
    opened, put = threading.Event(), MemoryFileSystem.put_file

    def held(self, *words, **more):
        opened.wait()
        return put(self, *words, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", held)
    yield opened
    opened.set()


def limits(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    for name, value in seconds.items():
        module = "store" if name in ("ANSWER_S", "STALLED_S", "PATIENCE_S") else "backup_thread"
        monkeypatch.setattr(f"meshwright.checkpoint.{module}.{name}", value)


@pytest.mark.thorough
def test_a_silent_store_holds_up_nothing_and_is_reported_once(tmp_path: Path, monkeypatch, gate) -> None:
    limits(monkeypatch, STALLED_S=0.02, PATIENCE_S=0.0, RETRY_S=0.0, LAST_S=0.3)
    run, store, told = tmp_path / "run", f"memory://silent-{tmp_path.name}", Reports()
    saver = make_saver(run, told, backup_to=store, every_steps=1, keep_last=2)
    for step in range(1, 13):
        saver.after_step(step, lambda step=step: state_of(tiny(1), step))
        assert len(list(checkpoints(run))) <= 4, "two newest, the one that is copied, the one that was just saved"
    saver.finish(12, lambda: state_of(tiny(1), 12))
    hanging = [thread for thread in threading.enumerate() if thread.name in ("backup", "store request")]
    assert len(hanging) <= 9, "what is tried again does not pile up either"
    failed = [event for event in told.events if event["kind"] == "backup_failed"]
    assert [(event["store"], event["error"]) for event in failed] == [(store, "it has not answered for 0.02 s")]
    last = told.events[-1]
    assert (last["kind"], last["step"], last["store"]) == ("backup_missing", 12, store)
    assert saver.backup_missing is not None and "step-00000012, has no backup in memory" in told.messages[-1]
    assert 12 in [one.facts.step for one in checkpoints(run)]


def test_what_is_saved_meanwhile_takes_the_place_of_what_waits(tmp_path: Path, gate) -> None:
    run, store, told = tmp_path / "run", f"memory://slow-{tmp_path.name}", Reports()
    saver = make_saver(run, told, backup_to=store, every_steps=1, keep_last=1, keep_every=4)
    for step in range(1, 8):
        saver.after_step(step, lambda step=step: state_of(tiny(1), step))
    while not any(event["step"] == 7 for event in told.events):
        saver.count(saver.ballot())
    gate.set()
    saver.finish(7, lambda: pytest.fail("it is saved"))
    copied = [event["step"] for event in told.events if event["kind"] == "backup"]
    assert copied[-2:] == [7, 4] and not {2, 3, 5, 6} & set(copied[1:]), copied
    assert [one.step for one in backups(run, store)] == [one.facts.step for one in checkpoints(run)] == [7, 4]


def test_the_end_of_a_run_says_how_long_it_waits_and_every_rank_takes_part(tmp_path: Path, monkeypatch, gate) -> None:
    limits(monkeypatch, LAST_S=120.0, _SAID_AFTER_S=0.0, _LOOK_S=0.05)
    run, store, told, phases = tmp_path / "run", f"memory://last-{tmp_path.name}", Reports(), []

    def alive(phase: str) -> None:
        phases.append(phase)
        if len(phases) == 3:
            gate.set()

    saver = make_saver(run, told, backup_to=store, alive=alive)
    saver.finish(1, lambda: state_of(tiny(1), 1))
    assert told.messages == [f"waiting at most 120 s for the backup of step-00000001 to {store}"]
    assert set(phases) == {"waiting for the backup"} and told.events[-1]["kind"] == "backup"
    assert saver.backup_missing is None

    sums, phases[:] = [0.0, 1.0, 1.0, 0.0], []
    job = Job.model_validate({"checkpoint": {"backup_to": store}})
    other = Saver(
        job, Lease(run, 0), told.event, told.messages.append, torch.empty, rank=1, ranks=2,
        sums=lambda values: [sums.pop(0)], alive=phases.append,
    )  # fmt: skip
    other.finish(1, lambda: pytest.fail("it is saved"))
    assert phases == ["waiting for the backup"] * 3 and sums == []


def test_a_last_checkpoint_without_a_copy_is_reported_although_an_earlier_one_has_one(
    tmp_path: Path, monkeypatch, gate
) -> None:
    limits(monkeypatch, LAST_S=0.2, STALLED_S=60.0)
    store, told = f"memory://ends-{tmp_path.name}", Reports()
    saver = make_saver(tmp_path / "run", told, backup_to=store, every_steps=1)
    gate.set()
    saver.after_step(1, lambda: state_of(tiny(1), 1))
    while not any(event["kind"] == "backup" for event in told.events):
        saver.count(saver.ballot())
    gate.clear()
    saver.finish(2, lambda: state_of(tiny(1), 2))
    assert (told.events[-1]["kind"], told.events[-1]["step"]) == ("backup_missing", 2)


def test_a_store_that_is_silent_from_the_start_is_refused(tmp_path: Path, monkeypatch) -> None:
    limits(monkeypatch, ANSWER_S=0.05)
    opened = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "makedirs", lambda *_, **__: opened.wait())
    with pytest.raises(UserError, match=r"cannot be written \(it has not answered for 0.05 s\); fix it or leave it"):
        require_backup(f"memory://mute-{tmp_path.name}", tmp_path / "run", resume=False)
    opened.set()


def test_a_truncated_read_is_repeated_and_costs_no_step(tmp_path: Path, monkeypatch) -> None:
    run, store, cut = tmp_path / "run", f"memory://cut-{tmp_path.name}", [True, True]
    saver = make_saver(run, backup_to=store)
    for step in (1, 2):
        saver.finish(step, lambda step=step: state_of(tiny(1), step))
    shutil.rmtree(run)
    get = MemoryFileSystem.get_file

    def truncated(self, path, file, **more):
        get(self, path, file, **more)
        if not path.endswith("manifest.json") and cut and cut.pop():
            Path(file).write_bytes(Path(file).read_bytes()[:-5])

    monkeypatch.setattr(MemoryFileSystem, "get_file", truncated)
    restored, passed_over = restore(run, store)
    assert restored is not None and restored.facts.step == 2 and passed_over == [] and cut == []


@pytest.mark.parametrize("method", ["ls", "exists"])
def test_a_listing_that_fails_once_is_repeated_before_a_resume_is_refused(tmp_path: Path, monkeypatch, method) -> None:
    run, store, failures = tmp_path / "run", f"memory://{method}-{tmp_path.name}", [ConnectionResetError("gone")]
    make_saver(run, backup_to=store).finish(1, lambda: state_of(tiny(1), 1))
    shutil.rmtree(run)
    answer = getattr(MemoryFileSystem, method)

    def failing(self, path, **more):
        if failures:
            raise failures.pop()
        return answer(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, method, failing)
    restored, passed_over = restore(run, store)
    assert restored is not None and restored.facts.step == 1 and passed_over == [] and failures == []


def test_a_copy_that_stays_the_same_is_not_sent_again(tmp_path: Path, monkeypatch) -> None:
    run, store, told, sent = tmp_path / "run", f"memory://same-{tmp_path.name}", Reports(), []
    make_saver(run, backup_to=store).finish(1, lambda: state_of(tiny(1), 1))
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda self, file, *_, **__: sent.append(file))
    job = Job.model_validate({"checkpoint": {"backup_to": store}})
    again = Saver(job, Lease.claim(run), told.event, told.messages.append, torch.empty, saved_step=1)
    again.finish(1, lambda: pytest.fail("it is saved"))
    assert sent == [] and [event["kind"] for event in told.events] == ["backup"]
