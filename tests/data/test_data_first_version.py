"""Jobs of version 0.1 on text and JSONL keep their tokens, their order and their held-out part, so that runs go on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from data_texts import text_of

from meshwright.data import TokenStore, prepare
from meshwright.data.tokenizer import train_tokenizer
from meshwright.job.data import Data
from meshwright.train.feed import fingerprint

# Of each job what version 0.1 made: the fingerprint that its checkpoints hold, hashes of both splits, and the bounds.
KEPT: dict[str, tuple[dict[str, Any], tuple[str, str, str], tuple[int, ...]]] = {
    "many files": (
        {"sources": ["many"], "validation_fraction": 0.1},
        ("f4510d233cdc18bc", "33b81bfd99a7dbd0", "cf370fdf5e85bc6b"),
        (0, 5796),
    ),
    "one file": (
        {"sources": ["one.txt"], "validation_fraction": 0.1},
        ("bd227eaed8fefcc1", "46d0cc02f43b4439", "e060e51f1e781745"),
        (0, 4922),
    ),
    "a file in pieces": (
        {"sources": ["long.txt"], "validation_fraction": 0.01},
        ("62d25a63b9d770e4", "c7f46c7fddf4635d", "de62390dd900eb83"),
        (0, 1143732),
    ),
    "lines": (
        {"sources": ["lines.jsonl"], "validation_fraction": 0.05},
        ("28800c874a7bb7e7", "3af28b15a84c3661", "3da9f7b8b5295760"),
        (0, 20143),
    ),
    "a blend": (
        {"sources": ["lines.jsonl", "one.txt", "many"], "weights": [1, 2, 3], "validation_fraction": 0.1},
        ("0bdbe40333a8cbbd", "4044ff98c2c4ac3d", "0b9ca047c7cfd196"),
        (0, 19590, 25058, 31185),
    ),
    "joined": (
        {"sources": ["plain.jsonl", "more.jsonl"], "join": "id", "validation_fraction": 0.1},
        ("948361b6f40c1445", "a07b043c540eed71", "410d298f9e164cc8"),
        (0, 29190),
    ),
    "conversations": (
        {
            "sources": ["talk.jsonl"],
            "format": "conversations",
            "validation_fraction": 0.1,
            "tokenizer": "tokenizer.json",
        },
        ("61386b3c9b49320c", "fdb2ccb4708308a8", "04d29a7aea109e3e"),
        (0, 2423),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    (root / "many").mkdir()
    for number in range(60):
        (root / "many" / f"{number:02}.txt").write_text(text_of(number))
    (root / "many" / "empty.md").write_text(" \n")
    (root / "one.txt").write_text("\ufeff" + "\n".join(text_of(n) for n in range(50)))
    (root / "long.txt").write_text("".join(f"  line {n}: {text_of(n, 12)}\n" for n in range(30_000)))
    plain = [{"text": text_of(n), "id": n} for n in range(200)]
    _write_lines(root / "plain.jsonl", plain)
    _write_lines(root / "lines.jsonl", [*plain, {"text": " ", "id": 5}])
    _write_lines(root / "more.jsonl", [{"text": text_of(n), "id": n % 50} for n in range(300, 400)])
    _write_lines(root / "talk.jsonl", [{"prompt": text_of(n, 6), "completion": " " + text_of(n, 9)} for n in range(80)])
    train_tokenizer([text_of(n) for n in range(50)], 300).save(root / "tokenizer.json")
    return root


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _hash(store: TokenStore) -> str:
    raw = store.read(0, len(store)).tobytes() + store.starts_between(0, len(store)).tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


@pytest.mark.thorough
@pytest.mark.parametrize("case", KEPT)
def test_tokens_are_those_of_version_0_1(folder: Path, case: str) -> None:
    fields, hashes, bounds = KEPT[case]
    given = {**fields, "sources": tuple(str(folder / name) for name in fields["sources"])}
    if "tokenizer" in fields:
        given["tokenizer"] = str(folder / fields["tokenizer"])
    corpus = prepare(Data(**given, cache=str(folder / "cache")), 300)
    assert (fingerprint(corpus), _hash(corpus.train), _hash(corpus.validation)) == hashes
    assert corpus.bounds == bounds
