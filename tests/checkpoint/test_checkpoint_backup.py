"""Copies of checkpoints elsewhere: kept by the run folder's rule, and brought back whole or not at all."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
from checkpoint_states import Reports, make_saver, save_model, state_of, tiny

from meshwright.checkpoint import Checkpoint, Damaged, Lease, backups, checkpoints, newest, require_backup, restore
from meshwright.errors import UserError
from meshwright.job import load_job


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, and a store that is no file system."""
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://store-{tmp_path.name}"


def saved_steps(run: Path, store: str, steps: range | list[int], **settings) -> Reports:
    told = Reports()
    saver = make_saver(run, told, backup_to=store, **settings)
    for step in steps:
        saver.finish(step, lambda step=step: state_of(tiny(step), step))
    return told


def edit(store: str, name: str, content: bytes | None) -> None:
    """Overwrite or remove a file of the store."""
    system, root = fsspec.core.url_to_fs(store)
    if content is None:
        system.rm_file(f"{root}/{name}")
    else:
        system.pipe_file(f"{root}/{name}", content)


def test_copies_are_kept_by_the_rule_of_the_run_folder(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    told = saved_steps(run, store, range(1, 6), keep_last=1, keep_every=2)
    assert [one.facts.step for one in checkpoints(run)] == [5, 4, 2]
    assert [(one.step, one.complete) for one in backups(run, store)] == [(5, True), (4, True), (2, True)]
    assert told.messages == []


def test_a_step_of_nine_digits_has_a_copy_that_comes_back(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [99_999_999, 100_000_000])
    shutil.rmtree(run)
    found, _ = restore(run, store)
    assert found is not None and found.facts.step == 100_000_000


def test_a_step_that_is_repeated_takes_the_place_of_its_first_copy(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [1])
    shutil.rmtree(run / "checkpoints/step-00000001")
    make_saver(run, backup_to=store).finish(1, lambda: state_of(tiny(7), 1))
    repeated = newest(run).path.joinpath("model.safetensors").read_bytes()
    shutil.rmtree(run)
    found, _ = restore(run, store)
    assert found is not None and found.path.joinpath("model.safetensors").read_bytes() == repeated


def test_what_a_kill_left_half_copied_goes_with_the_next_copy(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [1, 2])
    edit(store, "run/step-00000001/manifest.json", None)
    assert [(one.step, one.complete) for one in backups(run, store)] == [(2, True), (1, False)]
    saved_steps(run, store, [3])
    assert [one.step for one in backups(run, store)] == [3, 2]


def test_the_newest_sound_copy_comes_back_whole(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [1, 2, 3, 4])
    flipped = bytearray((run / "checkpoints/step-00000003/model.safetensors").read_bytes())
    flipped[-1] ^= 1
    before = {path.name: path.read_bytes() for path in newest(run).path.parent.joinpath("step-00000002").iterdir()}
    shutil.rmtree(run)
    edit(store, "run/step-00000004/manifest.json", None)
    edit(store, "run/step-00000003/model.safetensors", bytes(flipped))
    edit(store, "run/step-00000002/stray.pkl", b"never fetched")
    found, passed_over = restore(run, store)
    assert found is not None and found.facts.step == 2
    found.verify()
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == before
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert "step-00000004 has no manifest.json: the copy is incomplete" in passed_over[0]
    assert "step-00000003/model.safetensors was modified after it was written (its hash differs)" in passed_over[1]
    assert ".restoring" not in "".join(passed_over)


def test_an_object_store_keeps_and_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**variables, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        run, store = tmp_path / "run", "s3://bucket/runs"
        saved_steps(run, store, [1, 2, 3], keep_last=2)
        assert [(one.step, one.complete) for one in backups(run, store)] == [(3, True), (2, True)]
        shutil.rmtree(run)
        edit(store, "run/step-00000003/model.safetensors", b"another")
        found, [told] = restore(run, store)
        assert found is not None and found.facts.step == 2 and "step-00000003/model.safetensors has 7 bytes" in told
    finally:
        server.stop()


@pytest.mark.parametrize("failures", [3, 1 << 30])
def test_a_store_that_fails_half_way_is_asked_again_within_bounds(tmp_path: Path, monkeypatch, failures: int) -> None:
    """Of what was half written nothing counts as complete, and the run goes on."""
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr("meshwright.checkpoint.store.PATIENCE_S", 3.0 if failures == 3 else 0.3)
    put, get, left = MemoryFileSystem.put_file, MemoryFileSystem.get_file, [failures]

    def torn_put(self, source, place, **more):
        left[0] -= 1
        if left[0] < 0:
            return put(self, source, place, **more)
        self.pipe_file(place, Path(source).read_bytes()[:-7])
        if left[0] % 2:
            raise ConnectionResetError("the store went away")

    def torn_get(self, place, target, **more):
        left[0] -= 1
        if left[0] < 0:
            return get(self, place, target, **more)
        Path(target).write_bytes(b"half")
        raise TimeoutError("the store does not answer")

    monkeypatch.setattr(MemoryFileSystem, "put_file", torn_put)
    run, store = tmp_path / "run", f"memory://torn-{tmp_path.name}"
    told = saved_steps(run, store, [1])
    assert [one.complete for one in backups(run, store)] == [failures == 3]
    assert ("not copied to" in "".join(told.messages)) == (failures > 3)
    if failures == 3:
        shutil.rmtree(run)
        monkeypatch.setattr(MemoryFileSystem, "get_file", torn_get)
        left[0] = failures
        found, _ = restore(run, store)
        assert found is not None and found.facts.step == 1
        found.verify()


def test_a_copy_takes_the_place_of_the_damaged_original(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [1])
    (run / "checkpoints/step-00000001/model.safetensors").write_bytes(b"")
    assert isinstance(next(iter(checkpoints(run))), Damaged)
    restore(run, store)
    newest(run).verify()


def test_a_name_in_a_foreign_manifest_reaches_no_other_file(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    saved_steps(run, store, [1])
    manifest = json.loads((run / "checkpoints/step-00000001/manifest.json").read_text())
    manifest["files"]["../../../evil.safetensors"] = {"bytes": 1, "sha256": "0"}
    shutil.rmtree(run)
    edit(store, "run/step-00000001/manifest.json", json.dumps(manifest).encode())
    found, [told] = restore(run, store)
    assert found is None and "is not in the format this program writes" in told
    assert not list(tmp_path.rglob("evil*"))


def test_a_new_run_is_refused_the_copies_of_another_of_its_name(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    require_backup(store, run, resume=False)
    saved_steps(run, store, [1])
    with pytest.raises(UserError, match=r"holds checkpoints of another run named run; give run\.folder another name"):
        require_backup(store, run, resume=False)
    require_backup(store, run, resume=True)
    require_backup(store, tmp_path / "other", resume=False)


def test_nothing_comes_back_where_nothing_is(tmp_path: Path, store: str) -> None:
    assert restore(tmp_path / "run", store) == (None, [])
    assert not (tmp_path / "run").exists()


def test_what_a_killed_restore_left_is_cleared_away(tmp_path: Path) -> None:
    save_model(tmp_path, 1, tiny(1))
    (tmp_path / "checkpoints/.restoring-4/step-00000004").mkdir(parents=True)
    Lease.claim(tmp_path)
    assert not (tmp_path / "checkpoints/.restoring-4").exists()
    Checkpoint.open(tmp_path / "checkpoints/step-00000001").verify()


@pytest.mark.parametrize("target", ["foo://x", "zip://nothing", "ftp://localhost:1/x"])
def test_a_store_that_fails_when_it_is_opened_is_refused_in_one_sentence(tmp_path: Path, target: str) -> None:
    with pytest.raises(UserError, match=rf"checkpoint\.backup_to = {target} cannot be opened \(.*\); fix it"):
        require_backup(target, tmp_path / "run", resume=False)


def test_a_place_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.backup_to = .* is not allowed"):
        load_job("demo", ["checkpoint.backup_to="])


def test_a_run_folder_that_takes_nothing_back_is_told_in_a_sentence(tmp_path: Path) -> None:
    run, store = tmp_path / "run", f"file://{tmp_path}/store"
    saved_steps(run, store, [1])
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"step-00000001 cannot be written \(a file is in the way\)"):
        restore(run, store)
