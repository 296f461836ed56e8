"""A run outlives the reader of its output, and a full disk under its log."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.runs import RunFolder


def dead_pipe() -> io.TextIOWrapper:
    """Standard output whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> io.TextIOWrapper:
    """Standard output on a disk without space."""
    return Path("/dev/full").open("w")


def train(monkeypatch: pytest.MonkeyPatch, out: io.TextIOWrapper, folder: Path, *words: str) -> RunFolder:
    """The folder of a run whose output is lost; its exit code is 0, and later output does not fail."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(sys, "argv", ["meshwright", "train", "job.toml", *words])
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and sys.stdout is out
    out.close()
    return RunFolder.open(folder / "run")


@pytest.mark.parametrize(("out", "lost"), [(dead_pipe, "Broken pipe"), (full_disk, "No space left on device")])
def test_a_run_outlives_its_output(
    out: Callable[[], io.TextIOWrapper], lost: str, tiny_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(monkeypatch, out(), tiny_job.parent)
    assert run.state() == "done" and (run.path / "checkpoints/step-00000010").is_dir()
    [event] = run.events("output_lost")
    assert (event["stream"], event["error"]) == ("stdout", lost)
    if event["log"] is None:  # nothing is lost that the run folder does not have
        assert not (run.path / "logs").exists()
    else:
        assert event["log"] == "logs/rank-0.out" and "\nfinished at step 10 " in (run.path / event["log"]).read_text()


@pytest.mark.thorough
def test_a_launcher_and_its_ranks_outlive_their_output(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--nproc", "2", "--set", "layout.dp_replicate=2"]
    run = train(monkeypatch, dead_pipe(), tiny_job.parent, *words)
    assert run.state() == "done"
    assert [event["log"] for event in run.events("output_lost")] == ["logs/launcher.out"]
    text = (run.path / "logs/launcher.out").read_text()  # also of rank 0, which starts with the launcher's output
    assert "starting 2 ranks\n" in text and "\nfinished at step 10 " in text
