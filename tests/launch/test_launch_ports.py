"""Ports that another program has: said in one sentence, and another one is tried where nobody chose the port."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.launch.nodes import Node
from meshwright.ranks import slurm_variables

SMALL = str(Path(__file__).parents[1] / "small.toml")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_master_port_in_use_is_one_sentence(cli, taken: int) -> None:
    assert cli("train", SMALL).code == 0
    two = ["--set", "layout.dp_replicate=2", "--nproc", "1", "--nodes", "2", "--node-rank", "0"]
    told = cli("train", "run", "--resume", *two, "--master", f"127.0.0.1:{taken}")
    assert told.code == 1 and len(told.err.splitlines()) == 1
    assert f"the ranks cannot connect at --master 127.0.0.1:{taken} (the port is in use)" in told.err


def test_a_rank_whose_master_port_is_in_use_says_so(cli, tmp_path, taken: int, monkeypatch) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": taken,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    told = cli("train", SMALL, "--set", "layout.dp_replicate=2")
    assert told.code == 1 and len(told.err.splitlines()) == 1
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{taken} (the port is in use)" in told.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("master", ["host:0", "host:65536", "host:٣", "host", ":80", "host:1e3", "host:999999999999"])
def test_what_is_no_port_is_refused(master: str) -> None:
    with pytest.raises(UserError, match=r"--master .* is not host:port"):
        Node(0, 1, master)


def test_a_job_that_is_queued_again_meets_at_another_port() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}
    step |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    first, second = slurm_variables(step), slurm_variables({**step, "SLURM_RESTART_COUNT": "1"})
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
