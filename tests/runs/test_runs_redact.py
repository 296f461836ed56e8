"""What run files tell of a command and its surroundings: nothing that could be a secret."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runs import RunFolder
from meshwright.runs.redact import VARIABLES, recorded_command

SECRETS = ["NCCL_PASS", "SLURM_CREDENTIAL", "TORCH_AUTH", "CUDA_PASSWD", "SLURM_JWT", "OMP_X", "MESHWRIGHT_ANYTHING"]


def everything(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_a_run_folder_holds_no_secret_of_the_environment_or_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_TOPO_FILE", "https://me:hunter2@host/topology.xml")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    argv = ["/bin/meshwright", "train", "job.toml", "--wandb-key", "hunter2", "--set", "run.steps=3", "hunter2"]
    argv += ["--set", "x.y=hunter2", "--resume", "--nproc=4", "--token=hunter2", "--sbatch", "hunter2"]
    raw = "# https://h/a?token=hunter2\n"
    folder = RunFolder.create(tmp_path / "run", raw, {"run": {"steps": 1}}, argv)
    folder.describe_attempt(0, argv)
    folder.event("sink_failed", error="ConnectionError: https://me:hunter2@mlflow/x?key=hunter2 does not answer")
    told = everything(tmp_path / "run")
    assert "hunter2" not in told and "host/topology.xml" in told
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["variables"]["SLURM_JOB_ID"] == "7" and not set(SECRETS) & set(environment["variables"])
    assert environment["argv"] == [
        "meshwright", "train", "job.toml", "[hidden]", "--set", "run.steps=3", "[hidden]",
        "--set", "[hidden]", "--resume", "--nproc", "4", "[hidden]", "[hidden]",
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["--set", "--nproc", "--x", "--x=SECRET", "-p", "train", "a=b", "--json"]), max_size=6))
def test_only_the_job_and_known_options_are_recorded(words: list[str]) -> None:
    told = recorded_command(["meshwright", "train", "job.toml", *words, "--password", "SECRET", "SECRET"])
    assert "SECRET" not in " ".join(told) and told[:3] == ["meshwright", "train", "job.toml"]


def test_every_name_is_one_that_is_known() -> None:
    assert not [name for name in VARIABLES if any(word in name for word in ("PASS", "TOKEN", "KEY", "SECRET", "AUTH"))]
    assert {"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "SLURM_JOB_ID", "OMP_NUM_THREADS", "RANK"} <= VARIABLES


def test_what_is_prepared_is_named_without_its_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.data.raw import inputs
    from meshwright.data.raw.remote import RemoteEntry

    address = "https://me:hunter2@host/a.jsonl?X-Amz-Signature=hunter2"
    monkeypatch.setattr(inputs, "list_remote", lambda source: [RemoteEntry(source, 5, "now", True)])
    [file] = inputs.list_inputs([address]).files
    assert file.name == "https://host/a.jsonl?[hidden]" and file.remote is not None and file.remote.url == address


def test_a_script_is_its_owner_s_alone(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's variables are in it."""
    stub = tiny_job.parent / "bin/sbatch"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 7\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    done = cli("submit", "job.toml", "--site", "vega", "--time", "10", "--set", "run.folder=out")
    assert done.code == 0, done.err
    assert (tiny_job.parent / "out/slurm/run.sh").stat().st_mode & 0o077 == 0
