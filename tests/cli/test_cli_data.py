"""`meshwright data`: its JSON, its tables, and every mistake in one sentence with nothing left behind."""

import json
from pathlib import Path

import pytest

PREPARE = ["--vocab-size", "300", "--workers", "1"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"document {number} of sixty, about nothing"}) + "\n" for number in range(60))
    )
    return path


def test_prepare_inspect_verify(cli, lines: Path) -> None:
    done = cli("data", "prepare", "lines.jsonl", "--out", "out", *PREPARE, "--validation-fraction", "0.2", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    counts = [
        "tokens",
        "documents",
        "text_bytes",
        "vocab_size",
        "tokenizer_sha256",
        "bad",
        "left_out",
        "identity",
        "content",
        "formats",
    ]
    assert list(told) == ["folder", *counts, "shards", "files", "seconds", "retries"]
    assert told["documents"]["train"] + told["documents"]["validation"] == 60
    other = cli("data", "prepare", "lines.jsonl", "--out", "out", *PREPARE)
    assert (
        other.code == 2 and "--out out holds tokens of other sources, another tokenizer or other settings" in other.err
    )
    looked = cli("data", "inspect", "out", "--sample", "2", "--json")
    assert len(json.loads(looked.out)["samples"]) == 2
    assert sum(row["documents"] for row in json.loads(looked.out)["lengths"]) == told["documents"]["train"]
    table = cli("data", "inspect", "out", "--sample", "1")
    assert "about nothing" in table.out and "up to" in table.out and "bytes per token" in table.out
    assert json.loads(cli("data", "verify", "out", "--json").out)["ok"] is True
    Path("out/train-00000.bin").write_bytes(b"")
    damaged = cli("data", "verify", "out")
    assert damaged.code == 1 and "DAMAGED: train-00000.bin has 0 bytes" in damaged.out
    assert cli("data", "inspect", "out").code == 2


def test_bad_documents_are_counted_and_too_many_stop_it(cli, lines: Path) -> None:
    lines.write_text(lines.read_text() + '{"text": ""}\n{"text": \n{"text": 3}\n')
    done = cli("data", "prepare", "lines.jsonl", "--out", "out", *PREPARE)
    assert done.code == 0 and "1 bad: broken JSON, first at" in done.out and "lines.jsonl:62" in done.out
    stopped = cli("data", "prepare", "lines.jsonl", "--out", "strict", *PREPARE, "--max-bad", "0.03")
    assert stopped.code == 2
    assert "2 of 62 documents cannot be used (1 broken JSON, first at" in stopped.err and "1 wrong field" in stopped.err
    assert "empty" not in stopped.err, "an empty document loses nothing"
    assert cli("data", "prepare", "lines.jsonl", "--out", "strict", *PREPARE, "--max-bad", "0.04").code == 0


def test_conversations_and_joined_sources_are_prepared(cli, lines: Path) -> None:
    Path("talk.jsonl").write_text('{"prompt": "one and one is", "completion": " two"}\n' * 40)
    done = cli("data", "prepare", "talk.jsonl", "--out", "talk", *PREPARE, "--format", "conversations")
    assert done.code == 0 and " conversations for train" in done.out
    looked = json.loads(cli("data", "inspect", "talk", "--json").out)
    assert looked["content"] == "conversations" and looked["samples"][0]["text"] == "one and one is two"
    parts = [{"text": "one and one is", "counts": False}, {"text": " two", "counts": True}]
    assert looked["samples"][0]["parts"] == parts
    assert 1 < looked["samples"][0]["loss_tokens"] < looked["samples"][0]["tokens"]
    shown = cli("data", "inspect", "talk").out
    assert "what counts in the loss is between ⟦ and ⟧" in shown and "one and one is⟦ two⟧\n" in shown
    assert cli("data", "inspect", "talk", "--sample", "0").out.count("one and one") == 0
    Path("a.jsonl").write_text('{"text": "one", "id": 1}\n' * 30)
    Path("b.jsonl").write_text('{"text": "on one", "id": 1}')
    done = cli("data", "prepare", "a.jsonl", "b.jsonl", "--out", "joined", *PREPARE, "--join", "id")
    assert done.code == 0, done.err
    looked = json.loads(cli("data", "inspect", "joined", "--sample", "1", "--json").out)
    assert looked["samples"][0]["text"] == "one\n\non one"


def test_what_counts_is_coloured_at_a_terminal(cli, lines: Path, monkeypatch) -> None:
    Path("talk.jsonl").write_text('{"prompt": "one \\u001b[2J is", "completion": " two"}\n' * 40)
    cli("data", "prepare", "talk.jsonl", "--out", "talk", *PREPARE, "--format", "conversations")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard output for a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = cli("data", "inspect", "talk").out
    assert "what counts in the loss is green" in shown and "\x1b[1;32m two" in shown and "⟦" not in shown
    assert "\x1b[2J" not in shown


CASES = {
    "nothing to join": (["lines.jsonl", "--join", "id"], "--join id needs two sources or more"),
    "no template": (["lines.jsonl", "--format", "conversations", "--chat-template", "no"], "--chat-template no cannot"),
    "no source": (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
    "wrong field": (["lines.jsonl", "--text-field", "body"], "60 of 60 documents cannot be used (60 wrong field"),
    "tokenizer missing": (["lines.jsonl", "--tokenizer", "no.json"], "--tokenizer no.json cannot be read"),
    "tokenizer broken": (["lines.jsonl", "--tokenizer", "lines.jsonl"], "--tokenizer lines.jsonl is not a working"),
    "vocabulary too small": (["lines.jsonl", "--vocab-size", "9"], "--vocab-size 9 is too small"),
    "taken": (["lines.jsonl", "--out", "taken"], "--out taken exists and is not a prepared folder"),
    "a file": (["lines.jsonl", "--out", "lines.jsonl"], "--out lines.jsonl exists and is not a prepared folder"),
    "nothing in it": (["empty.txt", "--max-bad", "1"], "empty.txt holds no text to train on"),
    "no server": (["s3://nowhere/text.jsonl"], "s3://nowhere/text.jsonl could not be read for 0 s"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(cli, lines: Path, monkeypatch, case: str) -> None:
    from meshwright.data.raw import remote

    monkeypatch.setattr(remote, "PATIENCE_S", 0.0)
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    Path("taken").mkdir()
    Path("taken/file").write_text("mine")
    Path("empty.txt").write_text(" ")
    arguments, sentence = CASES[case]
    before = sorted(Path().rglob("*"))
    done = cli("data", "prepare", "--out", "out", "--workers", "1", *arguments)
    assert done.code == 2 and sentence in done.err, done
    assert len(done.err.strip().splitlines()) == 1 and "Traceback" not in done.err
    left = [path for path in sorted(Path().rglob("*")) if path not in before]
    assert left == [] or case == "wrong field", left


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_prepared_folder_is_refused(cli, command: str, tmp_path: Path) -> None:
    (tmp_path / "half/.partial").mkdir(parents=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/manifest.json").write_text('{"format": 1, "shards": []}')
    for folder, sentence in {
        "nowhere": "is not a prepared folder",
        "half": "was not prepared to its end; run the same meshwright data prepare again",
        "odd": "has format 1 where 2 is needed",
    }.items():
        done = cli("data", command, folder)
        assert done.code == 2 and sentence in done.err
