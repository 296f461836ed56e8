"""Bad input: one sentence that names the field and the fix, exit 2, nothing left behind, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.cli.output import print_written


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


CASES = {
    "unknown key": (["batch.micro_bach=2"], "batch.micro_bach is not a known setting; did you mean batch.micro_batch"),
    "wrong type": (["batch.micro_batch=two"], 'batch.micro_batch = "two" is not allowed; it should be a whole number'),
    "batch does not divide": (["batch.micro_batch=3"], "set batch.micro_batch to one of 1, 2, 4"),
    "sequence too long": (["batch.sequence_length=129"], "batch.sequence_length = 129 is longer than"),
    "missing data": (['data.sources=["nowhere.txt"]'], "nowhere.txt"),
    "empty data": (['data.sources=["empty.txt"]'], "empty.txt"),
    "not JSON": (['data.sources=["bad.jsonl"]'], "bad.jsonl"),
    "no such field": (['data.sources=["bad.jsonl"]', "data.text_field=body"], "bad.jsonl"),
    "not UTF-8": (['data.sources=["latin.txt"]'], "latin.txt"),
    "too little text": (['data.sources=["short.txt"]'], "data.sources"),
    "tokenizer missing": (["data.tokenizer=no.json"], "data.tokenizer"),
    "tokenizer too large": (["data.tokenizer=large.json", "model.vocab_size=260"], "model.vocab_size"),
    "device not there": (["run.device=cuda:7"], 'run.device = "cuda:7" is not available'),
    "device unknown": (["run.device=tpu"], 'run.device = "tpu" is not a device'),
    "run folder exists": (["run.folder=corpus"], "run.folder"),
    "unknown preset": (["model.preset=tiny-lama"], "did you mean tiny-llama"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(cli, tiny_job: Path, case: str) -> None:
    overrides, sentence = CASES[case]
    folder = tiny_job.parent
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    from meshwright.data.tokenizer import train_tokenizer

    train_tokenizer(["some words to learn merges from, words and words"] * 9, 300).save(folder / "large.json")
    before = listing(folder)
    result = cli("train", "job.toml", *[word for override in overrides for word in ("--set", override)])
    assert result.code == 2, result
    assert sentence in result.err
    assert len(result.err.strip().splitlines()) == 1 and "Traceback" not in result.err
    left = {path for path in listing(folder) - before if not path.startswith("cache")}
    assert left == set()
    assert not [path for path in listing(folder) if "tmp" in path or "partial" in path]


def test_a_broken_json_line_is_named_by_file_and_number(cli, tiny_job: Path) -> None:
    (tiny_job.parent / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    result = cli("train", "job.toml", "--set", 'data.sources=["bad.jsonl"]')
    assert "bad.jsonl" in result.err and "line 2" in result.err.replace(":2", " line 2")


def test_a_run_folder_is_never_written_over(cli, tiny_job: Path) -> None:
    assert cli("train", "job.toml", "--set", "run.steps=1").code == 0
    before = (tiny_job.parent / "run/metrics.jsonl").read_bytes()
    result = cli("train", "job.toml", "--set", "run.steps=1")
    assert result.code == 2 and "run.folder" in result.err
    assert (tiny_job.parent / "run/metrics.jsonl").read_bytes() == before


def test_debug_shows_the_traceback(cli, tiny_job: Path) -> None:
    from meshwright.errors import UserError

    with pytest.raises(UserError):
        cli("train", "job.toml", "--set", "run.device=tpu", "--debug")


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs the right to mount one")
def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    tiny_job: Path, tmp_path: Path, warm_command: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=260k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this sandbox does not let root mount a tmpfs")
    try:
        arguments = ["train", "job.toml", "--set", "data.cache=cache", "--set", "run.folder=disk/run"]
        too_large = _command(
            warm_command, tmp_path, *arguments
        )  # 4 bytes × 124,000 parameters do not fit: refused before it starts
        assert too_large.returncode == 2 and "run.folder" in too_large.stderr and "GB free" in too_large.stderr
        assert list(disk.iterdir()) == []

        smaller = ["--set", "model.width=32", "--set", "model.ffn_width=64", "--set", "model.layers=1"]
        fills = _command(warm_command, tmp_path, *arguments, *smaller, "--set", "run.steps=4000")
        assert fills.returncode == 2, fills
        assert "run.folder" in fills.stderr and len(fills.stderr.strip().splitlines()) == 1
        assert not list(disk.rglob("*.partial"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _command(commands: Path, cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([commands / "meshwright", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_commands_that_only_read(cli, tiny_job: Path) -> None:
    explained = cli("job", "explain", "job.toml", "--set", "batch.micro_batch=4", "--json")
    fields = {row["field"]: row for row in json.loads(explained.out)["fields"]}
    assert fields["batch.micro_batch"]["value"] == 4 and fields["batch.micro_batch"]["origin"] == "override"
    assert fields["model.width"]["origin"] == "preset tiny-llama"
    assert all(row["meaning"] for row in fields.values())
    table = cli("job", "explain", "job.toml")
    assert table.code == 0 and "micro_batch" in table.out
    schema = cli("job", "schema")
    assert json.loads(schema.out)["title"] == "Job"
    doctor = cli("doctor", "--json")
    assert doctor.code == 0 and json.loads(doctor.out)["ok"] is True
    assert cli("--version").out.startswith("meshwright ")
    assert cli("train", "nothing.toml").code == 2
    assert cli("train").code == 2


LONG = "x" * 5000
PATHS = {
    "status": [LONG], "logs": [LONG], "cancel": [LONG], "report": [LONG], "generate": [LONG],
    "chat": [LONG], "eval": [LONG], "replay": [LONG, "--step", "1"],
    "job explain": [LONG], "job from-deepspeed": [LONG], "plan --check": [LONG],
    "data inspect": [LONG], "checkpoint list": [LONG], "checkpoint verify": [LONG],
    "checkpoint import": [LONG, "--out", "o"], "studio --port 0 --host": [LONG], "submit demo --site": [LONG],
    "plan --model": [f"{LONG}.json"],
    "train": [LONG], "verify --layer": [f"{LONG}.py:A"], "schedule --svg": [LONG], "data prepare": [LONG, "--out", "o"],
    "train demo --set": [f"run.folder={'y' * 300}"],
}  # fmt: skip


@pytest.mark.parametrize("command", PATHS)
def test_a_name_the_system_does_not_take(cli, tmp_path: Path, command: str) -> None:
    """Too long, and of bytes that are no text."""
    refused = cli(*command.split(), *PATHS[command])
    assert refused.code == 2 and "internal error" not in refused.err, refused.err
    nul = cli(*command.split(), *["a\0b" if word == LONG else word for word in PATHS[command]])
    assert nul.code == 2 and "internal error" not in nul.err, nul.err


def test_a_path_in_the_way_and_one_that_may_not_be_read(cli, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    assert cli("status", "file/run").code == 2
    assert "internal error" in broken(cli, monkeypatch, FileNotFoundError(2, "No such file", "ours/never-made"))
    refused = broken(cli, monkeypatch, PermissionError(13, "Permission denied", "/root/x"))
    assert refused == "meshwright: /root/x: Permission denied; check its permissions\n"
    assert broken(cli, monkeypatch, FileNotFoundError(2, "Gone", "a")) == "meshwright: a: Gone; give another path\n"
    assert "internal error" in broken(cli, monkeypatch, OSError(9, "Bad file descriptor"))


def broken(cli, monkeypatch, error: Exception) -> str:
    """What `status a` says where the system answers with an error."""
    import meshwright.launch.slurm as slurm

    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(slurm, "status_of", fail)
    return cli("status", "a").err


def test_a_lack_of_memory_or_threads_is_a_sentence(cli, monkeypatch) -> None:
    told = broken(cli, monkeypatch, MemoryError("Unable to allocate 9 TiB"))
    assert told.startswith("meshwright: this process can get no more memory (Unable to allocate 9 TiB); choose")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    told = broken(cli, monkeypatch, refused.value)
    assert "no more memory (you tried to allocate 4503599627370496 bytes" in told and "internal error" not in told
    assert "can start no further thread; raise ulimit -u" in broken(
        cli, monkeypatch, RuntimeError("can't start new thread")
    )
    assert "internal error" in broken(cli, monkeypatch, RuntimeError("can't go on"))


@pytest.mark.parametrize(
    ("command", "limit_kib", "least"),
    [(["train", "demo"], 2_000_000, "4 GiB"), (["job", "explain", "demo"], 500_000, "1 GiB")],
)
def test_a_small_address_space_is_refused_before_a_library_aborts(
    tmp_path: Path, command: list[str], limit_kib: int, least: str
) -> None:
    program = f'ulimit -v {limit_kib} && exec "$0" -m meshwright "$@"'
    ended = subprocess.run(
        ["sh", "-c", program, sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2 and f"ulimit -v = {limit_kib} allows" in ended.stderr and least in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("encoding", "variables"),
    [
        ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("iso8859-1", {"PYTHONIOENCODING": "latin1", "PYTHONUTF8": "1"}),
    ],
)
def test_an_encoding_other_than_utf_8_is_refused(tmp_path: Path, encoding: str, variables: dict[str, str]) -> None:
    (tmp_path / "jöb.toml").write_text('[model]\npreset = "tiny-llama"\n')
    command = [sys.executable, "-m", "meshwright", "job", "explain", "jöb.toml"]
    refused = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert f"encoding for files and output is {encoding} here" in refused.stderr and "PYTHONUTF8=1" in refused.stderr


def test_a_stranger_s_key_does_not_command_the_terminal(cli, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[model]\n"\\u001b[31mred\\u0007" = 1\n["\\u009b2Jx"]\ny = 1\n')
    result = cli("job", "explain", "keys.toml")
    assert result.code == 2 and "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} is not a known" in result.err
    assert not {"\x1b", "\x07", "\x9b"} & set(result.err)


def test_what_a_model_writes_does_not_command_the_terminal(monkeypatch, capsys) -> None:
    for is_terminal, shown in ((True, "a\ufffd[2J\n"), (False, "a\x1b[2J\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)  # noqa: B023
        print_written("a\x1b[2J")
        assert capsys.readouterr().out == shown


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "job", "explain", "nowhere.toml"]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, cwd=tmp_path, stderr=full).returncode == 2
