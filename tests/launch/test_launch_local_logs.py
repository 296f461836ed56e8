"""`logs` of a run on this machine, and what `train` says about a folder or a run that is already there."""

import threading
from pathlib import Path
from types import SimpleNamespace

from waiting import LIMIT_S

from meshwright.job import load_job
from meshwright.runs import RunFolder

LINES = """start attempt 0
step 0/12 validation loss 5.0000
step 1/12 loss 4.0000 10 tokens/s
step 3/12 loss 4.0000 10 tokens/s
checkpoint step 3
stop reason failed error a�b
resume step 3 attempt 1
start attempt 1 step 3
step 6/12 loss 4.0000 10 tokens/s
step 6/12 validation loss 4.5000
"""


def run_folder(path: Path) -> RunFolder:
    job = load_job("demo", ["run.steps=12", "log.every_steps=3"]).job
    folder = RunFolder.create(path, "", job.model_dump(mode="json"), ["meshwright"])
    folder.event("start", attempt=0)
    folder.metric({"step": 0, "val_loss": 5.0})
    for step in range(1, 5):
        folder.metric({"step": step, "loss": 4.0, "tokens_per_s": 10.0, "attempt": 0})
    folder.event("checkpoint", step=3)
    folder.event("stop", reason="failed", error="a\x1bb")
    folder.event("resume", step=3, attempt=1)
    folder.event("start", attempt=1, step=3)
    for step in range(4, 7):
        folder.metric({"step": step, "loss": 4.0, "tokens_per_s": 10.0, "attempt": 1})
    folder.metric({"step": 6, "val_loss": 4.5})
    folder.close()
    return folder


def plain(text: str) -> str:
    """Without times, and with single spaces."""
    lines = [line.split() for line in text.splitlines()]
    return "".join(" ".join(words[words[0].startswith("20") :]) + "\n" for words in lines)


def test_logs_of_a_local_run_are_what_it_recorded_in_the_order_it_happened(cli, tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    shown = cli("logs", "run")
    assert shown.code == 0 and plain(shown.out) == LINES, shown
    assert cli("logs", "run", "--rank", "0").out == shown.out
    refused = cli("logs", "run", "--rank", "1")
    assert refused.code == 2 and "no log of rank 1" in refused.err


def test_a_local_run_is_followed_to_its_end(cli, tmp_path: Path, monkeypatch) -> None:
    folder, waits = run_folder(tmp_path / "run"), threading.Event()
    monkeypatch.setattr("meshwright.launch.slurm.logs.time", SimpleNamespace(sleep=lambda seconds: waits.set()))

    def train_on() -> None:
        assert waits.wait(LIMIT_S)
        folder.metric({"step": 12, "loss": 3.0, "attempt": 1})
        folder.event("stop", reason="finished", step=12)
        folder.close()

    thread = threading.Thread(target=train_on)
    thread.start()
    shown = cli("logs", "run", "--follow")
    thread.join()
    assert plain(shown.out) == LINES + "step 12/12 loss 3.0000\nstop reason finished step 12\n", shown


def test_a_folder_that_is_taken_is_offered_to_resume_first(cli, tiny_job: Path) -> None:
    run_folder(tiny_job.parent / "run")
    refused = cli("train", "job.toml")
    assert refused.code == 2
    assert 'run.folder = "run" holds a run; add --resume to continue it, or choose another folder' in refused.err
    submitted = cli("submit", "job.toml", "--site", "vega", "--time", "10", "--dry-run")
    assert submitted.code == 2 and "continue it with meshwright submit run, or choose another" in submitted.err
    refused = cli("train", "job.toml", "--set", "run.folder=corpus")
    assert refused.code == 2 and 'run.folder = "corpus" exists and is not an empty folder; choose an' in refused.err
