"""What an import or export refuses: by name, without running anything, with nothing left behind."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import UserError
from meshwright.runs.folder import RunFolder
from meshwright.runs.huggingface import export_run, import_folder

pytest.importorskip("transformers")
from hf_folders import make_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "hf"
    make_folder(path, "llama-scaled-tied")
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(original, tmp_path / "hf")
    return tmp_path / "hf"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


class Marks:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "ran")


def refused(folder: Path, match: str) -> None:
    out = folder.parent / "new" / "run"
    with pytest.raises(UserError, match=match) as caught:
        import_folder(folder, out)
    assert len(str(caught.value).splitlines()) == 1
    assert not out.parent.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth", "named in the index"]
)
def test_a_pickle_is_refused_and_never_run(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    harmful = pickle.dumps(Marks(marker))
    if name == "named in the index":
        (folder / "pytorch_model.bin").write_bytes(harmful)
        listed = json.loads((folder / INDEX).read_text())
        listed["weight_map"] = dict.fromkeys(listed["weight_map"], "pytorch_model.bin")
        (folder / INDEX).write_text(json.dumps(listed))
        refused(folder, r"lists 'pytorch_model\.bin', but only safetensors")
    else:
        for path in (*shards(folder), folder / INDEX):
            path.unlink()
        (folder / name).write_bytes(harmful)
        refused(folder, r"cannot be read" if name == "model.safetensors" else f"only as a pickle \\({name}\\)")
    assert not marker.exists()
    pickle.loads(harmful)
    assert marker.exists()  # it would have shown


def test_pickles_beside_safetensors_are_left_alone(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Marks(marker)))
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')")
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", "fp32")
    assert not marker.exists()
    kept = {path.name for root in ("run", "out") for path in (tmp_path / root).rglob("*") if path.is_file()}
    assert not {name for name in kept if name.endswith((".bin", ".pkl", ".py"))}


def edit(change: Callable[[dict[str, Any]], object], file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))

    return apply


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = shards(folder)[-1]
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return apply


LAST = "model.norm.weight"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "is not a folder; download"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
    "no weights": (lambda f: [p.unlink() for p in (*shards(f), f / INDEX)], r"has neither model\.safetensors nor"),
    "lost shard": (lambda f: shards(f)[1].unlink(), r"lists model-00002.*, which is missing"),
    "torn shard": (lambda f: shards(f)[1].write_bytes(shards(f)[1].read_bytes()[:-4]), r"model-00002.* cannot be read"),
    "outside": (
        edit(lambda i: i["weight_map"].update({LAST: "../x.safetensors"}), INDEX),
        r"lists '\.\./x\.safetensors'",
    ),
    "index of nothing": (edit(lambda i: i.pop("weight_map"), INDEX), r"is not an index of tensors"),
    "false index": (
        edit(lambda i: i["weight_map"].update({"model.ghost": i["weight_map"][LAST]}), INDEX),
        r"lists model\.ghost, which none of its files contains",
    ),
    "missing": (
        lambda f: (edit(lambda i: i["weight_map"].pop(LAST), INDEX)(f), edit_tensors(lambda t: t.pop(LAST))(f)),
        r"lack model\.norm\.weight",
    ),
    "surplus": (edit_tensors(lambda t: t.update({"model.extra": torch.ones(1)})), r"contain model\.extra"),
    "misshapen": (
        edit_tensors(lambda t: t.update({LAST: torch.ones(3)})),
        r"shape \(3,\) but the model needs \(48,\)",
    ),
    "format": (edit_tensors(lambda t: t.update({LAST: t[LAST].double()})), r"model\.norm\.weight is stored as F64"),
    "head": (edit_tensors(lambda t: t.update({"lm_head.weight": torch.ones(301, 48)})), r"differs from the embedding"),
    "shape": (edit(lambda c: c.update(num_key_value_heads=4), "config.json"), r"is not a valid model \(.*kv_heads"),
    "field": (edit(lambda c: c.update(quantization_config={"bits": 4}), "config.json"), "quantization_config"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_folder_that_is_not_whole_is_refused_by_name(folder: Path, case: str) -> None:
    spoil, match = SPOILT[case]
    spoil(folder)
    refused(folder, match)


def test_export_refuses_what_it_cannot_do_and_leaves_nothing(cli, original: Path, tmp_path: Path) -> None:
    import_folder(original, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "file").touch()
    for out, options, match in (
        ("full", (), "full exists and is not an empty folder"),
        ("file/out", (), "a file is in the way"),
        ("out", ("--dtype", "int4"), "--dtype = int4"),
    ):
        told = cli("checkpoint", "export", "run", out, *options)
        assert told.code == 2 and match in told.err and len(told.err.strip().splitlines()) == 1, told.err
    assert "is not a run folder" in cli("checkpoint", "export", str(original), "out").err
    resolved = tmp_path / "run/job.resolved.json"
    odd = json.loads(resolved.read_text())
    odd["model"]["layers"] = 2
    resolved.write_text(json.dumps(odd))
    assert "do not match the run's model at layers.2" in cli("checkpoint", "export", "run", "out").err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "full", "file"}


def test_a_full_disk_leaves_no_half_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *arguments: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    import_folder(folder, tmp_path / "run")
    monkeypatch.setattr("meshwright.checkpoint.hf_write.write_safetensors", full)
    with pytest.raises(UserError, match="no space left"):
        export_run(tmp_path / "run", tmp_path / "deep/out", "fp32")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_parameters", "x"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("num_attention_heads", 0),
        ("layer_types", 5),
    ],
)
def test_a_field_of_another_kind_is_refused(folder: Path, field: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    refused(folder, r"config\.json (is not a valid model \(|has ).*; (download it from the model's page|correct it)")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_without_end_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    refused(folder, f"{name} (cannot be read as JSON .nested too deeply|is not an index).*; download it again")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}"])
def test_a_tokenizer_that_does_not_work_is_refused(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(folder, r"hf/tokenizer\.json is not a working tokenizer\.json")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b'{"model": 5}', b'{"model": {"foo": 1}}'])
def test_a_run_whose_job_was_altered_is_refused(cli, original: Path, tmp_path: Path, content: bytes) -> None:
    RunFolder.create(tmp_path / "run", "", {}, [])
    (tmp_path / "run/job.resolved.json").write_bytes(content)
    for command in (["checkpoint", "export", "run", "out"], ["generate", "run"], ["train", "run", "--resume"]):
        told = cli(*command)
        assert told.code == 2 and "run/job.resolved.json" in told.err and len(told.err.splitlines()) == 1, told.err
