"""Tables whose dictionaries stand for far more rows than their file could hold, and small ones that must be read."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attacks.case import Case, Family

MIB = 1 << 20
SMALL_RATIO, SMALL_BYTES = 500, 4 * MIB
"""A file of which the rows are smaller than both of these may not be refused."""


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of tables."""
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"), seconds=60.0)


def _run(seed: str, folder: Path) -> None:
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.raw import Taking, Text, list_inputs, plan_units, read_unit

    chance = random.Random(seed)
    characters, rows = chance.choice([8, 100, 10_000, MIB]), 2 * chance.choice([5, 50, 500, 20_000, 200_000])
    conversations = chance.random() < 0.3
    path = folder / chance.choice(["a.parquet", "a.arrow"])
    _write(_table(characters, rows, conversations), path, chance)
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, (), "a") if conversations else None

    documents, bytes_read = 0, 0
    expected = rows // 2 if conversations else rows
    small = rows * characters < min(SMALL_BYTES, SMALL_RATIO * path.stat().st_size)
    try:
        for unit in plan_units(list_inputs([str(path)]).files):
            for item in read_unit(unit, Taking(chat=chat)):
                documents += isinstance(item, Text)
                bytes_read += item.size_bytes if isinstance(item, Text) else 0
                assert bytes_read < 2000 * path.stat().st_size + 64 * MIB, "far more was read than the file may hold"
                if conversations and documents == 200:  # each takes a template's time
                    return
    except Exception:
        assert not small, f"{rows} rows of {characters} characters in {path.stat().st_size} bytes were refused"
        raise
    assert documents == expected, f"{documents} documents of {expected}"


def _table(characters: int, rows: int, conversations: bool) -> pa.Table:
    """Rows that share one text."""
    indices = pa.array([0] * rows, pa.int8())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array([("word " * characters)[:characters]]))
    if not conversations:
        return pa.table({"text": texts})
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (rows // 2), pa.int8()), pa.array(["user", "assistant"]))
    messages = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(range(0, rows + 1, 2), pa.int32()), messages)})


def _write(table: pa.Table, path: Path, chance: random.Random) -> None:
    codec = chance.choice([None, "zstd"])
    if path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
            out.write_table(table)
        return
    group = chance.choice([1000, MIB])
    limit = 64 * MIB
    pq.write_table(table, path, compression=codec or "none", row_group_size=group, dictionary_pagesize_limit=limit)


DICTIONARIES = Family("dictionaries", draw, weight=0.3)
