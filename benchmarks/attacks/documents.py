"""Documents of odd code points, halves of pairs, names of control tokens, NULs, long lines; through every format."""

import csv
import functools
import io
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attacks.case import Case, Family

PIECES = [
    "a word",
    "\0",
    "\ud800",
    "\udfff",
    "\ufeff",
    "\ufdd0",
    "\u202e",
    "<|endoftext|>",
    "</s>",
    "\r",
    "\n",
    "\x1a",
    "é",
]
PIECES += ["\U0010ffff", " ", "\x85", "\u2028", '"', "'", ",", "\\", "{", "x" * 20_000, "﷽" * 50, "e" + "\u0301" * 500]
VALUES = [None, 1, 1e999, [], {}, ["text"], {"text": "x"}, True, -(10**30)]
FIELDS = ["text", "id", "messages", "prompt", "completion", "conversations", "", "\0"]


@functools.cache
def tokenizer() -> str:
    """A tokenizer whose end of text is not marked as special."""
    from meshwright.data.tokenizer import train_tokenizer

    told = json.loads(train_tokenizer(["a word and another " * 20], 290).to_json())
    told["added_tokens"][0]["special"] = False
    return json.dumps(told)


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of documents."""
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"))


def _run(seed: str, folder: Path) -> None:
    from meshwright.data import prepare
    from meshwright.job.data import Data

    chance = random.Random(seed)
    records = [_record(chance) for _ in range(chance.randint(1, 30))]
    (folder / "tokenizer.json").write_text(tokenizer())
    source = _written(chance, records, folder)
    talk = chance.random() < 0.2
    given = {"tokenizer": str(folder / "tokenizer.json"), "cache": str(folder / "cache"), "validation_fraction": 0.0}
    way = chance.randrange(3)
    if way == 0:
        from attacks.archives import read_everything

        return read_everything(str(source), talk)
    if way == 1:
        data = Data(sources=(str(source),), format="conversations" if talk else "text", **given)
        corpus = prepare(data, 300)
        tokens, end = corpus.train.read(0, len(corpus.train)), corpus.tokenizer.end_of_text
        assert (tokens == end).sum() == len(corpus.train.starts_between(0, len(corpus.train)))
        return None
    from meshwright.data.streaming import open_flow

    flow = open_flow(Data(sources=(str(source),), stream=True, **given), 300)
    shard = flow.shard(0, 16, 0)
    for sample in range(8):
        shard.read(sample)
    return None


def _record(chance: random.Random) -> object:
    text = "".join(chance.choice(PIECES) for _ in range(chance.randint(0, 8)))
    if chance.random() < 0.1:
        return chance.choice(VALUES)
    return {
        chance.choice(FIELDS) if chance.random() < 0.2 else "text": text
        if chance.random() < 0.9
        else chance.choice(VALUES)
    }


def _written(chance: random.Random, records: list[object], folder: Path) -> Path:
    texts = [str(record.get("text", "")) if isinstance(record, dict) else "" for record in records]
    kind = chance.randrange(4)
    path = folder / ("a.jsonl", "a.csv", "a.parquet", "a.txt")[kind]
    if kind == 0:
        path.write_bytes(
            b"\n".join(
                json.dumps(r, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass") for r in records
            )
        )
    elif kind == 1:
        sink = io.StringIO()
        csv.writer(sink).writerows([["text"], *([text] for text in texts)])
        path.write_bytes(sink.getvalue().encode("utf-8", "surrogatepass"))
    elif kind == 2:
        raw = pa.array([text.encode("utf-8", "surrogatepass") for text in texts], pa.binary())
        pq.write_table(pa.table({"text": raw.view(pa.string())}), path)
    else:
        path.write_bytes("".join(texts).encode("utf-8", "surrogatepass"))
    return path


DOCUMENTS = Family("documents", draw)
