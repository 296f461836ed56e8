"""CPU ranks forked from their launcher."""

import json
import os
import runpy
import select
import shutil
import socket
from pathlib import Path

import pytest
from rich.console import Console
from waiting import wait_for_file

from meshwright.job import Job, load_job
from meshwright.launch import forked
from meshwright.launch.elastic import launch, run_under_agent
from meshwright.launch.worker import LAUNCHER, RUN_FOLDER, run_job
from meshwright.ranks import Place

RANKS = 3
SMALL = str(Path(__file__).parents[1] / "small.toml")


def test_no_rank_begins_before_all_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank forked while another connects could inherit a held lock of the C library, and hang."""
    forks: list[int] = []
    fork, wait = os.fork, forked._Gate.wait

    def fork_after_others() -> int:
        """Once each rank that was forked before is at the gate, or past it."""
        for rank in range(len(forks)):
            wait_for_file(tmp_path / f"waits-{rank}")
        assert not list(tmp_path.glob("began-*"))
        forks.append(len(forks))
        return fork()

    def wait_visibly(gate: forked._Gate) -> None:
        (tmp_path / f"waits-{os.environ['RANK']}").touch()
        wait(gate)

    def begin(*_: object, **__: object) -> None:
        (tmp_path / f"began-{os.environ['RANK']}").touch()

    monkeypatch.setattr(os, "fork", fork_after_others)
    monkeypatch.setattr(forked._Gate, "wait", wait_visibly)
    monkeypatch.setattr(runpy, "run_module", begin)  # inherited by the forks
    job = Job.model_validate({"run": {"device": "cpu"}})
    run_under_agent(job, tmp_path, RANKS, [])
    assert len(forks) == RANKS and len(list(tmp_path.glob("began-*"))) == RANKS


def test_a_rank_whose_launcher_died_before_it_connected_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_job(SMALL, ["layout.dp_replicate=2"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = str(server.getsockname()[1])  # nobody will listen there
    place = Place(1, 2, 1, 2)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    reader, writer = os.pipe()  # its end is read once no process holds the other end
    if (launcher := os.fork()) == 0:
        os.environ[LAUNCHER] = str(os.getpid())
        if os.fork() == 0:
            run_job(loaded, Console(quiet=True), place)
        os._exit(0)
    os.close(writer)
    os.waitpid(launcher, 0)
    assert select.select([reader], [], [], 120)[0], "the rank still waits"
    os.close(reader)
    assert "the launcher ended before this rank was connected" in (tmp_path / "error.json").read_text()


def test_a_launcher_whose_logs_another_one_removed_ends_normally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers of a run may end at the same moment, and both remove what is empty."""
    run = tmp_path / "run"
    loaded = load_job(SMALL, ["layout.dp_replicate=2", f"run.folder={json.dumps(str(run))}"])
    monkeypatch.setattr("meshwright.launch.elastic.run_agent", lambda *_, **__: shutil.rmtree(run / "logs"))
    assert launch(loaded, 2, ["train"], Console(quiet=True)).path == run
    assert not (run / "logs").exists()
