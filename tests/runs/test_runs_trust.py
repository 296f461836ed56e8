"""Code that a run folder names is run only with --trust: whoever made the folder chose it."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.runs import RunFolder

OWN = """
from meshwright.model.decoder import Decoder as build
from meshwright.model.sharding import DECODER_SHARDING as SHARDING
"""
EVIL = "from pathlib import Path\nPath('owned').touch()\nraise RuntimeError('mine')\n"


@pytest.fixture
def stranger(tiny_job: Path) -> Path:
    """A run folder that somebody sent, whose job names a file that came along."""
    job = load_job(str(tiny_job)).job.model_dump(mode="json")
    run = tiny_job.parent / "sent"
    job["model"]["file"], job["layout"]["dp_replicate"], job["data"]["sources"] = "sent/own.py", 1, ["corpus"]
    folder = RunFolder.create(run, "", job, [])
    folder.close()
    (run / "own.py").write_text(EVIL)
    (run / "tokenizer.json").write_text("{}")
    return run


COMMANDS: dict[str, list[str]] = {
    "replay": ["--step", "1"],
    "eval": [],
    "train": ["--resume"],
    "bench": ["--steps", "1"],
    "tune": [],
    "verify": [],
    "submit": ["--site", "vega", "--time", "10", "--dry-run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stranger_s_code_is_not_run(cli: Any, stranger: Path, command: str) -> None:
    refused = cli(command, "sent", *COMMANDS[command])
    assert refused.code == 2 and not Path("owned").exists()
    assert 'sent names model.file = "sent/own.py"' in refused.err and "--trust" in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["replay", "bench", "verify"])
def test_trusted_code_is(cli: Any, stranger: Path, command: str) -> None:
    ended = cli(command, "sent", "--trust", *COMMANDS[command])
    assert Path("owned").exists() and "mine" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        "job explain sent",
        "generate sent",
        "chat sent --once hello",
        "checkpoint export sent out",
        "report sent",
        "plan --check sent",
    ],
)
def test_what_runs_no_code_needs_no_flag(cli: Any, stranger: Path, words: str) -> None:
    done = cli(*words.split())
    assert "--trust" not in done.err and done.code in (0, 2) and not Path("owned").exists()


def test_a_job_file_of_the_command_line_needs_no_flag(tiny_job: Path, stranger: Path) -> None:
    own = tiny_job.parent / "own.py"
    own.write_text("")
    assert load_job(str(tiny_job), [f'model.file="{own}"']).job.model.file == str(own)
    assert load_job(str(stranger), [f'model.file="{own}"']).job.model.file == str(own), "the user's own word"
    with pytest.raises(UserError, match="add --trust"):
        load_job(str(stranger / "job.resolved.json"))


def test_a_job_file_that_lies_in_a_run_folder_is_the_folder_s(stranger: Path) -> None:
    (stranger / "job.toml").write_text('[model]\nfile = "sent/own.py"\n')
    with pytest.raises(UserError, match="add --trust"):
        load_job(str(stranger / "job.toml"))


def test_compiled_code_in_a_cache_is_code(stranger: Path) -> None:
    table = json.loads((stranger / "job.resolved.json").read_text())
    table["model"]["file"], table["run"]["compile"], table["data"]["cache"] = None, True, "sent/cache"
    (stranger / "job.resolved.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=r'names data\.cache = "sent/cache", from which run\.compile loads'):
        load_job(str(stranger))
    assert load_job(str(stranger), ["run.compile=false"]).from_run
    on_a_cpu = ["run.compile=auto", "run.device=cpu"]
    assert load_job(str(stranger), on_a_cpu).from_run, "which is not compiled"
    for changes in (["run.compile=auto", "run.device=auto"], [*on_a_cpu, "layout.async_tp=true", "layout.tp=2"]):
        with pytest.raises(UserError, match=r"which is code that would be run"):
            load_job(str(stranger), changes)


def test_a_profile_that_a_run_folder_names_writes_no_script(cli: Any, stranger: Path) -> None:
    table = json.loads((stranger / "job.resolved.json").read_text())
    table["model"]["file"], table["cluster"]["name"] = None, "sent/site.toml"
    (stranger / "job.resolved.json").write_text(json.dumps(table))
    (stranger / "site.toml").write_text('gpus_per_node = 1\npython = "sent/evil"\ntime = "10"\n')
    refused = cli("submit", "sent", "--dry-run")
    assert refused.code == 2 and 'names cluster.name = "sent/site.toml"' in refused.err and "--trust" in refused.err
    done = cli("submit", "sent", "--dry-run", "--trust")
    assert done.code == 0 and "sent/evil -P -m meshwright train" in done.out


def test_what_was_submitted_from_a_job_file_is_trusted_when_it_goes_on(cli: Any, tiny_job: Path) -> None:
    (tiny_job.parent / "own.py").write_text(OWN)
    words = ["submit", "job.toml", "--site", "vega", "--time", "10", "--dry-run"]
    assert "--trust" not in cli(*words).out
    script = cli(*words, "--set", 'model.file="own.py"')
    assert script.code == 0 and 'train "$run" --resume --trust' in script.out, script.err
