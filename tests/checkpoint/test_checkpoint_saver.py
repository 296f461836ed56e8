"""Saving beside the training: what is saved is the state of its step, failures leave the last one good."""

import errno
import math
import resource
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_states import Reports, make_saver, save_model, state_of, tiny
from waiting import wait_until

from meshwright.checkpoint import (
    Checkpoint,
    Fenced,
    Lease,
    Saver,
    checkpoint_path,
    checkpoints,
    newest,
    staging,
    surplus,
)
from meshwright.checkpoint.interval import Interval
from meshwright.cost import best_interval_s
from meshwright.errors import UserError
from meshwright.job.running import Checkpoint as Settings


def wait(saver: Saver) -> None:
    """Let a save end as a run's next steps would."""

    def has_ended() -> bool:
        if saver._save is not None:
            saver.count(saver.ballot())
        return saver._save is None

    wait_until(has_ended, "the save has not ended")
    if saver._thread is not None:
        saver._thread.join()
    saver.count(saver.ballot())


def hold_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until this is set."""
    from meshwright.checkpoint import saver as module

    gate = threading.Event()
    write = module.write_share
    monkeypatch.setattr(module, "write_share", lambda *given: gate.wait(10) and write(*given))
    return gate


def test_memory_for_copies_is_allocated_beside_the_first_steps_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[tuple[str, int]] = []

    def allocate(size: int) -> torch.Tensor:
        allocated.append((threading.current_thread().name, size))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    model, saver = tiny(1), make_saver(tmp_path, every_steps=3, allocate=allocate)
    for step in (1, 2):
        saver.after_step(step, lambda: state_of(model, 1))
    wait(saver)
    prepared = list(allocated)
    assert len(prepared) > 3 and {name for name, _ in prepared} == {"checkpoint"}
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert sum(size for _, size in prepared) >= sum(parameter.nbytes for parameter in model.parameters())
    assert max(size for _, size in prepared) <= max(largest + staging.ALIGNED_BYTES, 4096)
    saver.after_step(3, lambda: state_of(model, 3))
    wait(saver)
    assert allocated == prepared
    saved = newest(tmp_path)
    assert all(torch.equal(saved.whole(f"model/{name}"), parameter) for name, parameter in model.named_parameters())


def test_a_run_that_only_saves_its_end_prepares_nothing(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    saver.after_step(1, lambda: pytest.fail("the state is not needed"))
    assert saver._thread is None


def test_what_is_saved_is_the_state_at_its_step_not_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_back(monkeypatch)
    told, model = Reports(), tiny(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    saver = make_saver(tmp_path, told, every_steps=2)
    for step in (1, 2, 3):
        saver.after_step(step, lambda: state_of(model, 2))
        saver.count(saver.ballot())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0) if step > 1 else None
    assert told.events == [] and list(checkpoints(tmp_path)) == [], "training went on, nothing is visible"
    gate.set()
    wait(saver)
    saved = newest(tmp_path)
    assert saved.facts.step == 2
    assert all(torch.equal(saved.whole(f"model/{name}"), value) for name, value in before.items())
    [event] = told.events
    assert event["kind"] == "checkpoint" and event["bytes"] == saved.bytes
    assert 0 < event["pause_s"] < event["total_s"] and event["waited_s"] < 1.0


def test_a_save_due_during_another_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_back(monkeypatch)
    told, model = Reports(), tiny(1)
    saver = make_saver(tmp_path, told, every_steps=1)
    saver.after_step(1, lambda: state_of(model, 1))
    threading.Timer(0.2, gate.set).start()
    saver.after_step(2, lambda: state_of(model, 2))
    wait(saver)
    first, second = told.events
    assert first["waited_s"] < 0.1 < second["waited_s"]
    assert second["total_s"] > second["pause_s"], "the wait is told apart from the save's own time"


def test_disk_full_training_goes_on_and_the_last_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, model = Reports(), tiny(1)
    saver = make_saver(tmp_path, told, every_steps=1)
    saver.after_step(1, lambda: state_of(model, 1))
    wait(saver)

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # the system itself refuses to write on
    try:
        saver.after_step(2, lambda: state_of(model, 2))
        wait(saver)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [event["kind"] for event in told.events] == ["checkpoint", "checkpoint_failed"]
    assert told.events[1]["step"] == 2 and "large" in told.events[1]["error"].lower()
    assert told.messages == [
        f"warning: the checkpoint of step 2 failed ({told.events[1]['error']}); training continues, the last complete "
        "one is step 1"
    ]
    newest(tmp_path).verify()
    assert newest(tmp_path).facts.step == 1 and not any(Lease(tmp_path, 0).folder.iterdir())

    monkeypatch.setattr("meshwright.checkpoint.retries.WAITS_S", (0.01, 0.01))
    usage = SimpleNamespace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"the last checkpoint could not be written .* MB free"):
        saver.finish(3, lambda: state_of(model, 3))
    assert [event["step"] for event in told.events[2:]] == [3, 3, 3], "tried again, and not for ever"
    usage.free = 10**12
    saver.finish(3, lambda: state_of(model, 3))
    assert newest(tmp_path).facts.step == 3


def test_the_last_checkpoint_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.retries.WAITS_S", (0.05, 0.05))
    beats, usage = [], SimpleNamespace(free=10)

    def alive(phase: str) -> None:
        beats.append(phase)
        usage.free = 10**12

    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    saver = make_saver(tmp_path, told := Reports(), alive=alive)
    saver.finish(3, lambda: state_of(tiny(1), 3))
    assert [event["kind"] for event in told.events] == ["checkpoint_failed", "checkpoint"] and beats


def test_a_last_checkpoint_that_succeeds_pauses_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pauses() -> Iterator[float]:
        yield pytest.fail("it pauses")

    monkeypatch.setattr("meshwright.checkpoint.retries.WAITS_S", pauses())
    saver = make_saver(tmp_path, Reports())
    saver.finish(3, lambda: state_of(tiny(1), 3))
    assert checkpoint_path(tmp_path, 3).is_dir()


def test_a_failure_whose_note_does_not_fit_on_the_disk_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *given: object) -> None:
        path.touch()  # a full disk takes a name, and no byte
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("meshwright.checkpoint.saver.write_share", full)
    told = Reports()
    saver = make_saver(tmp_path, told, every_steps=1)
    saver.after_step(1, lambda: state_of(tiny(1), 1))
    wait(saver)
    assert "the checkpoint of step 1 failed (No space left on device)" in told.messages[0]


def test_rows_go_to_the_disk_before_the_checkpoint_that_makes_up_for_them(tmp_path: Path) -> None:
    seen: list[int] = []
    saver = make_saver(tmp_path, every_steps=1, flush=lambda: seen.append(len(list(checkpoints(tmp_path)))))
    for step in (1, 2):
        saver.after_step(step, lambda step=step: state_of(tiny(step), step))
        wait(saver)
    assert seen == [0, 1]


def test_a_disk_that_does_not_answer_is_no_later_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease.claim(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        lease.require()
    Lease.claim(tmp_path)
    with pytest.raises(Fenced):
        lease.require()


def test_no_room_for_the_manifest_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.checkpoint import saver as module

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "seal", full)
    told = Reports()
    saver = make_saver(tmp_path, told, every_steps=1)
    saver.after_step(1, lambda: state_of(tiny(1), 1))
    wait(saver)
    assert told.events == [{"kind": "checkpoint_failed", "step": 1, "error": "No space left on device"}]
    assert "none is complete yet" in told.messages[0] and list(checkpoints(tmp_path)) == []


def test_a_stale_writer_is_fenced_off_at_every_point(tmp_path: Path) -> None:
    stale, model = make_saver(tmp_path, every_steps=1), tiny(1)
    stale.after_step(1, lambda: state_of(model, 1))
    stale._thread.join()  # written, not yet agreed on
    fresh = make_saver(tmp_path, every_steps=1)
    assert (stale._lease.attempt, fresh._lease.attempt) == (0, 1)
    with pytest.raises(Fenced, match=r"taken over by a later attempt than this one \(0\)"):
        stale.count(stale.ballot())
    stale._commit(stale._save)  # as if it had been just past the check
    assert list(checkpoints(tmp_path)) == []
    fresh.finish(2, lambda: state_of(model, 2))
    with pytest.raises(Fenced):
        stale.finish(2, lambda: state_of(tiny(9), 2))
    assert newest(tmp_path).manifest.attempt == 1
    newest(tmp_path).verify()


def test_a_claim_clears_what_a_killed_attempt_left(tmp_path: Path) -> None:
    killed = Lease.claim(tmp_path)
    (killed.folder / "step-00000003").mkdir()
    (killed.folder / "step-00000003/model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints/.removed-step-00000001-99").mkdir()
    lease = Lease.claim(tmp_path)
    assert lease.attempt == 1 and Lease.claim(tmp_path, at_least=7).attempt == 7
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [".attempt-000007"]


def test_what_is_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_model(tmp_path, step, tiny(step), keep_last=2, keep_every=3)
    assert [one.facts.step for one in checkpoints(tmp_path)] == [7, 6, 3]
    (checkpoint_path(tmp_path, 7) / "manifest.json").unlink()
    save_model(tmp_path, 8, tiny(8), keep_last=1, keep_every=None)
    left = [one.facts.step if isinstance(one, Checkpoint) else None for one in checkpoints(tmp_path)]
    assert left == [8, None], "a damaged one counts for nothing and is left for a person to look at"
    assert surplus(tmp_path, 1, None) == []
    assert surplus(tmp_path, 1, None, damaged=True) == [checkpoint_path(tmp_path, 7)]


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save_model(tmp_path, step, tiny(step), keep_last=2)
    assert newest(tmp_path).facts.step == 100_000_001
    assert [found.facts.step for found in checkpoints(tmp_path)] == [100_000_001, 100_000_000]


def test_a_step_saved_again_takes_the_place_of_the_damaged_one(tmp_path: Path) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    (path / "model.safetensors").unlink()
    save_model(tmp_path, 1, tiny(2))
    newest(tmp_path).verify()
    assert newest(tmp_path).manifest.attempt == 1


def test_a_backup_is_a_checkpoint_elsewhere_and_its_failure_harms_nothing(tmp_path: Path) -> None:
    told, run, store = Reports(), tmp_path / "a-run", tmp_path / "store"
    saver = make_saver(run, told, backup_to=f"file://{store}", keep_last=1)
    for step in (1, 2):
        saver.finish(step, lambda step=step: state_of(tiny(step), step))
    assert [event["kind"] for event in told.events] == ["checkpoint", "backup"] * 2
    Checkpoint.open(store / "a-run" / "step-00000002").verify()
    assert [one.facts.step for one in checkpoints(run)] == [2]
    shutil.rmtree(store)
    store.write_text("a file is in the way")
    saver.finish(3, lambda: state_of(tiny(3), 3))
    assert told.events[-1]["kind"] == "backup_missing" and "step-00000003, has no backup in" in told.messages[-1]
    assert newest(run).facts.step == 3


def test_the_interval_by_steps_minutes_and_cost() -> None:
    now = [100.0]
    interval = partial(Interval, clock=lambda: now[0])
    never = interval(Settings(every_steps=0, every_minutes=0), None)
    assert not any(never.due_at(step) for step in range(1, 9)) and not never.due_by_time()
    steps = interval(Settings(every_steps=3), None)
    assert [step for step in range(1, 10) if steps.due_at(step)] == [3, 6, 9] and not steps.due_by_time()
    minutes = interval(Settings(every_minutes=0.5), None)
    now[0] += 29
    assert not minutes.due_by_time()
    now[0] += 1
    assert minutes.due_by_time()
    minutes.saved()
    assert not minutes.due_by_time()

    assert best_interval_s(2.0, 10_000.0) == math.sqrt(40_000.0) == 200.0
    auto = interval(Settings(auto=True), 10_000.0)
    now[0] += 60
    assert auto.due_by_time()
    auto.saved()
    auto.measured(pause_s=2.0, total_s=20.0)
    now[0] += 199
    assert not auto.due_by_time()
    now[0] += 1
    assert auto.due_by_time()
    auto.measured(pause_s=0.001, total_s=50.0)
    auto.saved()
    now[0] += 49
    assert not auto.due_by_time(), "never more often than a save takes"
