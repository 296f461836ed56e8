"""What a run says of its data when it starts: little text, what was left out, and other tokens than version 0.1's."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job

SETTINGS = [
    "data.cache=cache", "run.steps=1", "evaluation.sample_tokens=0", "batch.sequence_length=16", "data.workers=0",
    "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32",
    "data.validation_fraction=0",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)


def train(*overrides: str, resume: bool = False) -> str:
    told = io.StringIO()
    loaded = load_job("job.toml", [*SETTINGS, *overrides, "run.folder=run"])
    run_job(loaded, Console(file=told, width=400), resume=resume)
    return told.getvalue()


def test_text_shorter_than_one_step_is_noted() -> None:
    Path("short.txt").write_text("a few words and no more of them " * 4)
    told = train('data.sources=["short.txt"]', "batch.global_batch=64", "batch.micro_batch=64")
    assert "note: data.sources hold " in told and "fewer than batch.global_batch = 64: every step reads some" in told


def test_what_is_left_out_is_noted_and_enough_text_is_not() -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("words enough for some sequences " * 200)
    assert "note:" not in train('data.sources=["texts"]')
    Path("texts/scan.pdf").write_bytes(b"%PDF\xff")
    Path("run").rename("before")
    told = train('data.sources=["texts"]')
    assert "note: left out of data.sources, being of no known kind" in told and "texts/scan.pdf" in told


def test_a_stream_says_the_same() -> None:
    Path("texts").mkdir()
    with gzip.open("texts/a.jsonl.gz", "wt") as file:
        file.writelines('{"text": "words enough for some sequences"}\n' for _ in range(200))
    Path("texts/b.txt").write_text("words enough for some sequences " * 200)
    assert "note:" not in train('data.sources=["texts"]', "data.stream=true")
    Path("texts/a.jsonl.gz").unlink()
    Path("texts/scan.pdf").write_bytes(b"%PDF\xff")
    Path("run").rename("before")
    told = train('data.sources=["texts"]', "data.stream=true", "batch.global_batch=512", "batch.micro_batch=512")
    assert "note: left out of data.sources, being of no known kind" in told and "texts/scan.pdf" in told
    assert "note: data.sources hold at most 6,401 tokens, fewer than the 8,192 of a step" in told


def test_a_csv_that_version_0_1_read_as_text_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([f"row {number} of a few words"] for number in range(300))])
    train('data.sources=["rows.csv"]')
    train('data.sources=["rows.csv"]', "run.steps=2", resume=True)
    monkeypatch.setattr("meshwright.runs.resume.fingerprint", lambda corpus: "of the file as one text")
    with pytest.raises(
        UserError,
        match=r"does not produce the tokens run/checkpoints/step-\d+ was trained on \(version 0\.1 took CSV files for "
        r"plain text .*, and .*rows\.csv is now read by rows or unpacked\); restore them or start a new run",
    ):
        train('data.sources=["rows.csv"]', "run.steps=3", resume=True)
