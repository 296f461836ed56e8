"""What is torn, altered or foreign is named and passed over; nothing in it is ever run."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_states import save_model, tiny
from safetensors.torch import save_file

from meshwright.checkpoint import (
    Checkpoint,
    Damaged,
    StoredWeights,
    checkpoints,
    newest,
    newest_weights,
    remove,
    surplus,
)
from meshwright.checkpoint.reading import RECORD_BYTES
from meshwright.checkpoint.records import Manifest
from meshwright.checkpoint.shares import seal_of
from meshwright.checkpoint.tensorfile import hash_file
from meshwright.errors import UserError

WEIGHTS = "model.safetensors"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def flip_weights(path: Path) -> None:
    flip(path / WEIGHTS, -9)


def truncate(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-4])


def delete_shard(path: Path) -> None:
    (path / WEIGHTS).unlink()


def delete_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def alter_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["time"] = "2020-01-01"
    (path / "manifest.json").write_text(json.dumps(manifest))


def tear_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:50])


def alter_index(path: Path) -> None:
    flip(path / "index.json", 30)


def old_step_under_a_new_name(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


DAMAGES: dict[Callable[[Path], None], str] = {
    flip_weights: r"model\.safetensors was modified after it was written \(its hash differs\)",
    truncate: r"model\.safetensors has \d+ bytes but was written with \d+: it is truncated",
    delete_shard: r"model\.safetensors is missing",
    delete_manifest: r"step-00000002 has no manifest\.json",
    alter_manifest: r"manifest\.json was modified after it was written \(its seal differs\)",
    tear_manifest: r"manifest\.json is not in the format this program writes",
    alter_index: r"index\.json was modified",
    old_step_under_a_new_name: r"step-00000002 holds the state of step 1: it is a copy under another step's name",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_previous_one_stays_good(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_model(tmp_path, 1, tiny(1))
    path = save_model(tmp_path, 2, tiny(2))
    Checkpoint.open(path).verify()
    damage(path)
    with pytest.raises(Damaged, match=DAMAGES[damage]) as caught:
        Checkpoint.open(path).verify()
    assert len(str(caught.value).splitlines()) == 1
    Checkpoint.open(path.with_name("step-00000001")).verify()
    if damage is not flip_weights:  # which only reading all of it shows
        assert newest(tmp_path).facts.step == 1
        assert [type(found) for found in checkpoints(tmp_path)] == [Damaged, Checkpoint]


class Trap:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def forge(path: Path, name: str) -> None:
    """Make the manifest agree with a file as it is now: a seal is no signature."""
    text = json.loads((path / "manifest.json").read_text())
    text["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": hash_file(path / name)}
    try:
        manifest = Manifest.model_validate_json(json.dumps(text))
        text["seal"] = seal_of(manifest)
    except ValueError:
        pass  # a name no manifest may have
    (path / "manifest.json").write_text(json.dumps(text))


@pytest.mark.parametrize("where", ["tensor file", "extra file", "listed file", "metadata", "index", "manifest"])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    path, mark = save_model(tmp_path, 1, tiny(1)), tmp_path / "mark"
    trap = pickle.dumps(Trap(mark))
    if where == "tensor file":
        (path / WEIGHTS).write_bytes(trap)
        forge(path, WEIGHTS)
    elif where == "extra file":
        (path / "data.pkl").write_bytes(trap)
    elif where == "listed file":
        (path / "data.pkl").write_bytes(trap)
        forge(path, "data.pkl")
    elif where == "metadata":
        values = {
            name.removeprefix("model/"): Checkpoint.open(path).whole(name) for name in Checkpoint.open(path).names()
        }
        save_file(values, path / WEIGHTS, {"pickle": trap.hex()})
        forge(path, WEIGHTS)
    else:
        name = f"{where}.json"
        text = json.loads((path / name).read_text())
        text["pickle"] = trap.hex()
        (path / name).write_text(json.dumps(text))
        if where == "index":
            forge(path, name)
    with pytest.raises(Damaged):
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        checkpoint.whole("model/final_norm.weight")
    assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists(), "the trap works where it is opened"


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    text = (path / "index.json").read_text().replace('"file":"model.safetensors"', '"file":"../model.safetensors"', 1)
    (path / "index.json").write_text(text)
    forge(path, "index.json")
    with pytest.raises(Damaged, match="not a file of a checkpoint"):
        Checkpoint.open(path)


def test_verify_can_be_shared_out(tmp_path: Path) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    flip_weights(path)
    refused = []
    for share in range(3):
        try:
            Checkpoint.open(path).verify(share, 3)
        except Damaged:
            refused.append(share)
    assert len(refused) == 1, "one of the shares has the file"
    assert torch.is_tensor(Checkpoint.open(path).whole("model/final_norm.weight"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "Q7"), ("offsets", [0, 0]), ("offsets", [1]), ("shape", [63]), ("file", "rng.safetensors")],
)
def test_an_index_whose_boxes_are_not_its_tensors_is_refused_when_opened(
    tmp_path: Path, field: str, value: object
) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    index = json.loads((path / "index.json").read_text())
    tensor = index["tensors"]["model/final_norm.weight"]
    (tensor if field == "dtype" else tensor["pieces"][0])[field] = value
    (path / "index.json").write_text(json.dumps(index))
    forge(path, "index.json")
    with pytest.raises(
        Damaged, match=r"index\.json is not in the format this program writes \(tensors\.model/final_norm\.weight"
    ):
        Checkpoint.open(path)


def boxes(*rows: tuple[int, int], file: str = WEIGHTS) -> list[dict[str, object]]:
    return [{"file": file, "offsets": [start, 0], "shape": [count, 64]} for start, count in rows]


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ([512, 64], boxes((0, 256), (0, 256))),  # half of it would be as memory had it
        ([512, 64], boxes((0, 300), (299, 212))),
        ([2**40, 64], boxes((0, 2**40))),  # more than its file holds
        ([2**62, 64], boxes((0, 2**61), (2**61, 2**61))),
        ([2**70, 64], boxes((0, 2**70))),
        ([1] * 40, [{"file": WEIGHTS, "offsets": [0] * 40, "shape": [1] * 40}]),
        ([512, 64], boxes((0, 512), file="../../secret")),
    ],
)
def test_boxes_that_overlap_or_have_no_room_are_refused_when_opened(
    tmp_path: Path, shape: list[int], pieces: list[dict[str, object]]
) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    index = json.loads((path / "index.json").read_text())
    index["tensors"]["model/embed.weight"] = {"shape": shape, "dtype": "F32", "pieces": pieces}
    (path / "index.json").write_text(json.dumps(index))
    forge(path, "index.json")
    with pytest.raises(Damaged, match=r"index\.json is not in the format this program writes"):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "job.json", WEIGHTS])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_plain_file_is_damage_and_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    save_model(tmp_path, 1, tiny(1))
    path = save_model(tmp_path, 2, tiny(2))
    (path / name).unlink()
    make(path / name)
    assert [type(found) for found in checkpoints(tmp_path)] == [Damaged, Checkpoint]
    assert newest_weights(tmp_path).facts.step == 1


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_a_record_without_end_is_damage(tmp_path: Path, name: str) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    os.truncate(path / name, RECORD_BYTES + 1)  # a hole
    if name == "index.json":
        forge(path, name)
    with pytest.raises(Damaged, match=f"{name} .*more than {RECORD_BYTES:,} bytes"):
        Checkpoint.open(path)


@pytest.mark.parametrize("job", ["[]", '{"layout": 3}', "[" * 3000, '{"run": {"steps": ' + "9" * 400 + "}}"])
def test_a_job_that_is_none_is_damage(tmp_path: Path, job: str) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    (path / "job.json").write_text(job)
    forge(path, "job.json")
    with pytest.raises(Damaged, match=r"job\.json is not in the format this program writes"):
        Checkpoint.open(path).job()


def test_a_manifest_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = save_model(tmp_path, 1, tiny(1)), os.open

    def refused(name: Path, *args: int, **more: int | None) -> int:
        if Path(name).name == "manifest.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, *args, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read \(Permission denied\); give") as caught:
        Checkpoint.open(path)
    assert not isinstance(caught.value, Damaged)


def test_altered_weights_are_passed_over_by_whoever_uses_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path, 1, tiny(1))
    path = save_model(tmp_path, 2, tiny(2))
    assert StoredWeights(tmp_path).step == 2 and capsys.readouterr().err == ""
    flip_weights(path)
    assert StoredWeights(tmp_path).step == newest_weights(tmp_path).facts.step == 1
    assert capsys.readouterr().err.splitlines()[0].startswith(f"skipped: {path / WEIGHTS} was modified")
    flip_weights(path.with_name("step-00000001"))
    with pytest.raises(UserError, match=r"no complete checkpoint under checkpoints/ \(.*step-00000002.* was modified"):
        newest_weights(tmp_path)


def test_pruning_keeps_sound_ones_and_not_those_whose_bytes_changed(tmp_path: Path) -> None:
    paths = [save_model(tmp_path, step, tiny(step)) for step in (1, 2, 3)]
    flip_weights(paths[2])
    assert surplus(tmp_path, 1, None, verify=True) == [paths[0]]
    assert surplus(tmp_path, 1, None, verify=True, damaged=True) == [paths[0], paths[2]]
    assert surplus(tmp_path, 1, 1, verify=True, damaged=True) == [paths[2]], "kept for good, and read as well"


def test_what_the_disk_cannot_give_back_is_damage_and_what_may_not_be_read_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    checkpoint = Checkpoint.open(path)

    def failing(error: int) -> None:
        def read(path: Path) -> str:
            raise OSError(error, os.strerror(error), str(path))

        monkeypatch.setattr("meshwright.checkpoint.reading.hash_file", read)

    failing(errno.EIO)
    with pytest.raises(Damaged, match=r"safetensors cannot be read \(Input/output error\)"):
        checkpoint.verify(group="model")
    assert [type(found) for found in checkpoints(tmp_path)] == [Damaged]
    failing(errno.EACCES)
    with pytest.raises(UserError, match=r"index\.json cannot be read \(Permission denied\); give") as caught:
        list(checkpoints(tmp_path))  # else a resume would begin from the start
    assert not isinstance(caught.value, Damaged)


def test_one_that_goes_while_it_is_read_is_not_told_as_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, 1, tiny(1))

    def gone(path: Path) -> str:
        shutil.rmtree(path.parent)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr("meshwright.checkpoint.reading.hash_file", gone)
    assert list(checkpoints(tmp_path)) == []


def test_a_file_or_link_in_the_place_of_a_checkpoint_is_removed_as_such(tmp_path: Path) -> None:
    path = save_model(tmp_path, 1, tiny(1))
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    path.with_name("step-00000002").write_text("no folder")
    last = save_model(tmp_path, 3, tiny(3))
    remove(surplus(tmp_path, 1, None, damaged=True))
    assert list(last.parent.glob("*step*")) == [last] and (elsewhere / WEIGHTS).is_file()
