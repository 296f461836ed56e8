"""The loader gives the batches that training sees; a source of one's own is read once, into the same reader."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from api_fixtures import registered  # noqa: F401

import meshwright
from meshwright.errors import UserError
from meshwright.registries import SOURCES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_batches_are_those_of_training(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.train.trainer import Trainer

    seen, plain = [], Trainer._next

    def noted(self: Trainer, data: object) -> object:
        given = plain(self, data)  # type: ignore[arg-type]
        seen.append(given[0].batch.tokens_BS)
        return given

    monkeypatch.setattr(Trainer, "_next", noted)
    meshwright.train(meshwright.load_job(tiny_job, set={"run.steps": 3, "data.workers": 1}))
    batches = [step.batch.tokens_BS for step in islice(meshwright.data.loader(tiny_job), 3)]
    assert len(seen) == 3 and all(torch.equal(one, other) for one, other in zip(seen, batches, strict=True))


def test_a_position_and_a_share_of_the_ranks_can_be_had(tiny_job: Path) -> None:
    whole = next(iter(meshwright.data.loader(tiny_job, position=8)))
    shares = [next(iter(meshwright.data.loader(tiny_job, position=8, rank=rank, ranks=2))) for rank in range(2)]
    assert torch.equal(torch.cat([share.batch.tokens_BS for share in shares]), whole.batch.tokens_BS)
    assert whole.batch.tokens_BS.shape == (4, 32) and {share.valid_count for share in shares} == {whole.valid_count}


def test_data_prepare_takes_it_too(own: None, cli: Any) -> None:
    @meshwright.register_source("prepared-notes")
    def notes(argument: str) -> Iterator[str]:
        yield from (f"note {number} of {argument}, about nothing" for number in range(60))

    words = (
        "data",
        "prepare",
        "prepared-notes:mine",
        "--out",
        "out",
        "--vocab-size",
        "300",
        "--workers",
        "1",
        "--json",
    )
    done = cli(*words)
    assert done.code == 0, done.err
    assert sum(json.loads(done.out)["documents"].values()) == 60
    assert "of mine, about nothing" in cli("data", "inspect", "out", "--sample", "1").out
    refused = cli("data", "prepare", "nobody-s:mine", "--out", "other", "--vocab-size", "300")
    assert refused.code == 2 and 'has "nobody-s", which is not known' in refused.err and not Path("other").exists()


@pytest.mark.parametrize("stream", [False, True])
def test_a_source_of_one_s_own_is_read_once(own: None, tiny_job: Path, stream: bool) -> None:
    calls = []

    @meshwright.register_source("noted")
    def noted(argument: str):
        calls.append(argument)
        yield from (f"text {number} of {argument}, which goes on" for number in range(80))
        yield {"text": "a record with its fields", "other": 1}

    job = meshwright.load_job(tiny_job, set={"data.sources": ["noted:this"], "data.stream": stream})
    first, again = (next(iter(meshwright.data.loader(job))).batch.tokens_BS for _ in range(2))
    assert torch.equal(first, again) and calls == ["this"]
    meshwright.data.loader(meshwright.load_job(job, set={"data.sources": ["noted:that"]}))
    assert calls == ["this", "that"]


def test_a_file_that_changed_and_another_version_are_read_again(own: None, tiny_job: Path) -> None:
    calls = []

    @meshwright.register_source("shouted")
    def shouted(argument: str):
        calls.append(argument)
        return Path(argument).read_text().upper().split("\n")

    Path("lines.txt").write_text("some words of a line that goes on\n" * 90)
    job = meshwright.load_job(tiny_job, set={"data.sources": ["shouted:lines.txt"]})
    for _ in range(2):
        meshwright.data.loader(job)
    assert len(calls) == 1
    Path("lines.txt").write_text("other words of a line that goes on\n" * 90)
    meshwright.data.loader(job)
    assert len(calls) == 2
    shouted.version = "2"
    for _ in range(2):
        meshwright.data.loader(job)
    assert len(calls) == 3


def test_mistakes_are_named(own: None, tiny_job: Path) -> None:
    def loaded(source: str) -> None:
        meshwright.data.loader(meshwright.load_job(tiny_job, set={"data.sources": [source]}))

    meshwright.register_source("numbers")(lambda argument: range(3))
    meshwright.register_source("nothing")(lambda argument: [])
    with pytest.raises(UserError, match=r'has "sqlite", which is not known; choose one of builtin, counted'):
        loaded("sqlite:notes.db")
    with pytest.raises(UserError, match=r"data\.sources: numbers:x yields a int as document 1"):
        loaded("numbers:x")
    with pytest.raises(UserError, match=r"data\.sources: nothing:x yields no document"):
        loaded("nothing:x")
    assert not list(Path("cache/meshwright").glob("source-*")) and SOURCES.names()[0] == "builtin"


def test_a_file_with_a_colon_is_a_file(tiny_job: Path) -> None:
    Path("old:notes.txt").write_text("some words of a line that goes on\n" * 90)
    meshwright.data.loader(meshwright.load_job(tiny_job, set={"data.sources": ["old:notes.txt"]}))
