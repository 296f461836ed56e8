"""Conversations and sources joined by key, prepared once for all: the same tokens as a job makes of the files."""

import gzip
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_texts import text_of

from meshwright.data import Corpus, TokenStore, prepare
from meshwright.data.prepared import Manifest, Wishes, build, open_prepared, verify
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [
    {"messages": [{"role": "user", "content": text_of(n, 5)}, {"role": "assistant", "content": text_of(n + 1, 9)}]}
    for n in range(60)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template beside it, and the conversations in one file."""
    path = tmp_path_factory.mktemp("talk")
    inner = tokenizers.Tokenizer.from_str(train_tokenizer([text_of(number) for number in range(50)], 300).to_json())
    inner.add_special_tokens([tokenizers.AddedToken("</assistant>", special=True)])
    inner.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "talk.jsonl").write_text("\n".join(json.dumps(talk) for talk in TALKS))
    return path


def job(*sources: Path, **fields) -> Data:
    return Data(sources=tuple(map(str, sources)), **{"validation_fraction": 0.0, **fields})


def wishes(folder: Path, *sources: Path, **fields) -> Wishes:
    named = tuple(map(str, sources or (folder / "talk.jsonl",)))
    content = {"content": "conversations", "validation_fraction": 0.0, **fields}
    return Wishes(named, folder / "tokenizer.json", **content)


def content(store: TokenStore) -> tuple[list[int], list[int], list[bool] | None]:
    targets = store.targets(0, len(store))
    starts = store.starts_between(0, len(store)).tolist()
    return store.read(0, len(store)).tolist(), starts, None if targets is None else targets.tolist()


def corpus_of(folder: Path, tmp_path: Path, **fields) -> Corpus:
    return prepare(job(folder, **fields), 400)


def test_prepared_conversations_are_what_a_job_makes_of_the_file(folder: Path, tmp_path: Path) -> None:
    manifest = build(wishes(folder), tmp_path / "out", 2, unit_bytes=2000)
    assert manifest.content == "conversations" and manifest.documents["train"] == 60 and len(manifest.shards) > 3
    assert verify(tmp_path / "out").damages == []
    from_files = prepare(
        job(
            folder / "talk.jsonl",
            format="conversations",
            tokenizer=str(folder / "tokenizer.json"),
            cache=str(tmp_path / "cache"),
        ),
        400,
    )
    prepared = corpus_of(tmp_path / "out", tmp_path, format="conversations")
    assert content(prepared.train) == content(from_files.train)
    tokens, _, targets = content(prepared.train)
    said = prepared.tokenizer.decode(np.array(tokens)[targets].tolist())
    # What the assistant says and the end of its turn; the end of text behind it is not its own.
    assert said == "".join(talk["messages"][1]["content"] + "</assistant>" for talk in TALKS)
    for start in range(0, len(prepared.train), 211):
        assert prepared.train.targets(start, start + 500).tolist() == targets[start : start + 500]


def test_workers_kinds_of_files_and_held_out_conversations(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(TALKS[:20]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, TALKS[20:40])).encode()))
    rows = [f'"{t["messages"][0]["content"]}","{t["messages"][1]["content"]}"' for t in TALKS[40:]]
    (tmp_path / "c.csv").write_text("\n".join(["prompt,completion", *rows]))
    sources = [tmp_path / name for name in ("a.parquet", "b.jsonl.gz", "c.csv")]
    for workers in (1, 3):
        build(wishes(folder, *sources, validation_fraction=0.2), tmp_path / str(workers), workers, unit_bytes=3000)
    manifests = [(tmp_path / str(workers) / "manifest.json").read_bytes() for workers in (1, 3)]
    assert manifests[0] == manifests[1]
    manifest = Manifest.model_validate_json(manifests[0])
    assert sum(manifest.documents.values()) == 60 and 3 < manifest.documents["validation"] < 25
    store = open_prepared(tmp_path / "1").store("validation")
    assert 0 < store.targets(0, len(store)).sum() < len(store)


def test_what_is_no_conversation_is_counted_with_its_reason(folder: Path, tmp_path: Path) -> None:
    bad = [{"text": "plain"}, {"messages": [{"role": "judge", "content": "x"}]}]
    source = tmp_path / "talk.jsonl"
    source.write_text("\n".join(map(json.dumps, [*TALKS, *bad])) + "\n{broken")
    manifest = build(wishes(folder, source), tmp_path / "out")
    assert manifest.documents["train"] == 60 and manifest.bad["broken JSON"]["count"] == 1
    places = manifest.bad["no conversation"]["first"]
    assert "talk.jsonl:61 (has none of" in places[0] and "'judge'" in places[1]
    with pytest.raises(
        UserError, match=r"2 no conversation, first at .*talk\.jsonl:61 \(has none of .*--max-bad 0\.01"
    ):
        build(wishes(folder, source, max_bad=0.01), tmp_path / "strict")


PAPERS = '{"text": "one", "id": 1}\n{"text": "two", "id": "b"}\n{"text": "three", "id": 3}\n{"text": "none"}\n'
NOTES = '{"text": "on two", "id": "b"}\n{"text": "on none", "id": 9}\n{"text": "on one", "id": 1}\n{"text": 5, "id": 2}'
MORE = "id,text\n1,again on one\n1,and again\n"


def test_sources_are_joined_by_key_whatever_kind_they_are(folder: Path, tmp_path: Path) -> None:
    sources = [tmp_path / name for name in ("papers.jsonl", "notes.jsonl", "more.csv")]
    for path, text in zip(sources, (PAPERS, NOTES, MORE), strict=True):
        path.write_text(text)
    wish = wishes(folder, *sources, content="text", join="id", max_bad=0.3)
    manifest = build(wish, tmp_path / "out", 2, unit_bytes=40)
    assert len(manifest.shards) > 1 and not (tmp_path / "out" / ".partial").exists()
    assert manifest.bad == {
        "no key": {"count": 1, "first": [manifest.bad["no key"]["first"][0]]},
        "wrong field": {"count": 1, "first": [f'{sources[1]}:4 (a int in "text")']},
    }
    prepared = open_prepared(tmp_path / "out")
    tokens, starts, _ = content(prepared.store("train"))
    pieces = [prepared.tokenizer.decode(part[:-1].tolist()) for part in np.split(np.array(tokens), starts[1:])]
    assert pieces == ["one\n\non one\n\nagain on one\n\nand again", "two\n\non two", "three"]


def test_a_key_that_the_others_have_not_stops_the_work(folder: Path, tmp_path: Path) -> None:
    sources = [tmp_path / name for name in ("papers.jsonl", "notes.jsonl")]
    sources[0].write_text('{"text": "one", "key": 1}')
    sources[1].write_text(NOTES)
    wish = wishes(folder, *sources, content="text", join="key")
    with pytest.raises(
        UserError, match=r"4 of 4 documents cannot be used \(3 no key, first at .*notes\.jsonl:1; 1 wrong"
    ):
        build(wish, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_join_that_was_made_is_kept_over_a_kill(folder: Path, tmp_path: Path, monkeypatch) -> None:
    module = importlib.import_module("meshwright.data.prepared.fill")
    sources = [tmp_path / name for name in ("papers.jsonl", "notes.jsonl")]
    for path, text in zip(sources, (PAPERS, NOTES), strict=True):
        path.write_text(text)
    wish = wishes(folder, *sources, content="text", join="id", max_bad=0.3)
    undisturbed = build(wish, tmp_path / "whole", unit_bytes=40)

    def die(*_):
        raise KeyboardInterrupt

    made = []
    write = module.write_joined
    monkeypatch.setattr(module, "write_joined", lambda *given: made.append(1) or write(*given))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_manifest", die)
        build(wish, tmp_path / "out", unit_bytes=40)
    assert build(wish, tmp_path / "out", unit_bytes=40) == undisturbed and len(made) == 1


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"join": "id"}, r"--join id joins several texts into one and does not support conversations; leave one out"),
        ({"join": "id", "content": "text"}, r"--join id needs two sources or more"),
        ({"chat_template": Path("x"), "content": "text"}, r"--chat-template x writes conversations, not text"),
        ({"chat_template": Path("nowhere")}, r"--chat-template nowhere cannot be read"),
    ],
)
def test_wishes_that_do_not_go_together(folder: Path, tmp_path: Path, fields, match) -> None:
    with pytest.raises(UserError, match=match):
        build(wishes(folder, **fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_has_no_fields(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UserError, match=r"a\.txt is plain text, in which there are no fields; give \.jsonl"):
        build(wishes(folder, tmp_path / "a.txt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_job_must_take_a_folder_for_what_it_is(folder: Path, tmp_path: Path) -> None:
    talk, text = tmp_path / "talk", tmp_path / "text"
    build(wishes(folder), talk)
    (tmp_path / "a.txt").write_text(text_of(1))
    build(wishes(folder, tmp_path / "a.txt", content="text"), text)
    with pytest.raises(
        UserError, match=r'data\.format = "text" does not fit .*talk, which holds conversations; set it'
    ):
        corpus_of(talk, tmp_path)
    with pytest.raises(UserError, match=r'data\.format = "conversations" does not fit .*text, which holds text'):
        corpus_of(text, tmp_path, format="conversations")
    for field, value in (("join", "id"), ("chat_template", "x.jinja")):
        fields = {field: value} | ({"format": "conversations"} if field == "chat_template" else {})
        with pytest.raises(UserError, match=rf'data\.{field} = "{value}" is for files, .*; leave it out'):
            corpus_of(talk, tmp_path, **fields)
