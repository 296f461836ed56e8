"""The fault table: each is put into a run of two ranks under torch's agent, which ends as if nothing had happened."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.launch.elastic
import meshwright.launch.worker  # noqa: F401  so that forked ranks find it imported

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fault_kinds
import fault_link
import fault_runs

RESTARTED = {
    "kill -9 a rank": "rank 1 was killed by SIGKILL",
    "exception on a rank": "rank 1 failed at meshwright/train/trainer.py",
    "a rank exits 0 early": "rank 1 exited with code 0 before the run was over",
    "out of memory on a rank": "rank 1: CPU ran out of memory",
    "loader worker killed": "it may have run out of memory or of space in /dev/shm: try fewer data.workers",
    "SIGSTOP a rank": "rank 1 gave no sign of life for",
    "a rank stuck outside of collectives": "rank 1 made no progress for",
    "rendezvous port taken": "the port is in use",
}
KINDS = ["rendezvous port taken", *fault_kinds.KINDS, "agent killed"]
STEPS = 50


def can_lock(folder: Path) -> bool:
    """Whether a folder can be made read-only here: root needs an attribute not every file system has."""
    try:
        fault_kinds.lock(folder, locked=True)
        fault_kinds.lock(folder, locked=False)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> fault_runs.Run:
    """A run left alone."""
    torch.set_num_threads(1)
    run = fault_runs.Run(tmp_path_factory.mktemp("quiet") / "here", STEPS, [])
    assert run.finish(fault_runs.fork, timeout_s=120.0) == 0, (run.folder / "out").read_text()
    return run


@pytest.fixture(scope="module")
def hurt(quiet: fault_runs.Run, tmp_path_factory: pytest.TempPathFactory) -> fault_runs.Run:
    """The same run, struck by every fault one after the other."""
    base = tmp_path_factory.mktemp("hurt")
    kinds = [kind for kind in KINDS if kind != "checkpoints turned read-only" or can_lock(base)]
    run = fault_runs.Run(base / "here", STEPS, fault_kinds.spread(kinds))
    assert run.finish(fault_runs.fork, timeout_s=240.0) == 0, (run.folder / "out").read_text()
    return run


def outcome(run: fault_runs.Run, kind: str) -> dict[str, Any]:
    found = [row for row in run.outcomes() if row["fault"] == kind]
    if not found:
        pytest.skip(f"{kind}: this file system cannot make a folder read-only")
    return found[0]


@pytest.mark.thorough
def test_nothing_is_lost(quiet: fault_runs.Run, hurt: fault_runs.Run) -> None:
    assert len(quiet.numbers()) == STEPS
    assert hurt.numbers() == quiet.numbers()


@pytest.mark.parametrize("kind", RESTARTED)
def test_a_fault_is_named_and_the_run_restarted(hurt: fault_runs.Run, kind: str) -> None:
    row = outcome(hurt, kind)
    assert row["struck"] and RESTARTED[kind] in row["cause"], row
    assert row["recovered_s"] > 0.0, row


def test_a_standstill_is_told_with_phases_and_stacks(hurt: fault_runs.Run) -> None:
    texts = [report.read_text() for report in (hurt.folder / "run/logs").glob("watchdog-*.txt")]
    [stopped] = [text for text in texts if text.startswith("rank 1 gave no sign of life")]
    [stuck] = [text for text in texts if text.startswith("rank 1 made no progress")]
    for text in (stopped, stuck):
        assert "last seen in step" in text and "--- rank 0 ---" in text and "accumulate" in text, text
    assert "--- rank 1 ---" not in stopped, "a stopped process answers nobody"
    assert "time.sleep(3600)" in stuck.partition("--- rank 1 ---")[2]
    hangs = [event for event in hurt.events() if event["kind"] == "hang" and event["missing"] == [1]]
    assert all("all_reduce" in event["last_seen"]["0"] for event in hangs), hangs


def test_memory_that_runs_out_is_told_in_bytes(hurt: fault_runs.Run) -> None:
    cause = outcome(hurt, "out of memory on a rank")["cause"]
    held, predicted = (int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})+", cause))
    assert 10**8 < held < 10**10 and 10**8 < predicted < 10**10, cause


def test_a_bad_number_is_rewound_to_the_last_checkpoint(hurt: fault_runs.Run) -> None:
    assert outcome(hurt, "NaN on a rank")["struck"]
    [bad] = [event for event in hurt.events() if event["kind"] == "bad_step"]
    [back] = [event for event in hurt.events() if event["kind"] == "rewind"]
    assert bad["loss"] == "nan" and bad["policy"] == "rewind" and bad["position"] == 4 * (bad["step"] - 1)
    assert back["step"] == bad["step"] > back["to"] >= bad["step"] - 6 and back["pass_over"] == []


def test_a_read_only_checkpoint_folder_is_told_and_training_goes_on(hurt: fault_runs.Run) -> None:
    row = outcome(hurt, "checkpoints turned read-only")
    assert (row["struck"] and "not permitted" in row["cause"]) or "denied" in row["cause"].lower(), row


def test_a_moved_clock_disturbs_nobody(hurt: fault_runs.Run) -> None:
    for kind in ("clock +1 h on a rank", "clock -1 h on a rank"):
        assert outcome(hurt, kind)["struck"]
    assert not [event for event in hurt.events() if event["kind"] == "restart" and "clock" in event["cause"]]


def test_ranks_whose_launcher_was_killed_save_and_leave_and_the_command_goes_on(hurt: fault_runs.Run) -> None:
    assert outcome(hurt, "agent killed")["cause"] == "launcher died"
    stops = [event for event in hurt.events() if event["kind"] == "stop"]
    assert [stop["reason"] for stop in stops] == ["interrupted", "finished"]


def test_every_restart_is_an_event_with_its_cause(hurt: fault_runs.Run) -> None:
    restarts = [event for event in hurt.events() if event["kind"] == "restart"]
    assert all(event["cause"] and event["ranks"] == 2 for event in restarts)
    assert len(restarts) >= len(RESTARTED)


def test_nothing_is_left_behind(hurt: fault_runs.Run) -> None:
    assert hurt.traces.left() == {"processes": [], "ports": [], "shared_memory": []}
    assert not (hurt.folder / "run/logs/stop").exists()


@pytest.mark.thorough
def test_so_many_faults_at_random_change_nothing(quiet: fault_runs.Run, tmp_path: Path) -> None:
    """The short form of `benchmarks/faults.py random --count 50`."""
    kinds = [kind for kind in fault_kinds.KINDS if "SIGSTOP" not in kind and "stuck" not in kind]
    run = fault_runs.Run(tmp_path / "here", STEPS, fault_kinds.at_random(6, seed=3, kinds=kinds, apart=7))
    assert run.finish(fault_runs.fork, timeout_s=240.0) == 0, (run.folder / "out").read_text()
    assert all(row["struck"] for row in run.outcomes())
    assert run.numbers() == quiet.numbers()
    assert run.traces.left() == {"processes": [], "ports": [], "shared_memory": []}


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="a cut wire between two hosts: needs root, ip and tc for network namespaces",
)
def test_two_hosts_whose_wire_is_cut_notice_and_go_on(quiet: fault_runs.Run, tmp_path: Path) -> None:
    """The short form of `benchmarks/faults.py link --cut 30`, with torch's agents on both hosts."""
    found = fault_link.cut_link(tmp_path, 6.0, STEPS, quiet, forked=True)
    assert found["exit_codes"] == [0, 0] and found["rows_that_differ"] == 0, found
    assert found["detected_s"] is not None and [1] in found["named"], found
    assert found["causes"] and found["left"]["processes"] == []
