"""Archives and tables of every kind: damaged real ones, bombs, false headers; and folders with more than files."""

import functools
import gzip
import io
import json
import os
import random
import socket
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attacks.case import Case, Family
from attacks.damage import damaged, damaged_value

TEXTS = [f"document {n} of a few words and more of them, {n * n}" for n in range(50)]
BOMB_MIB = (1, 30, 300)


@functools.cache
def whole() -> dict[str, bytes]:
    """A small real file of every kind, by name."""
    lines = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)).encode()
    rows = "id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS))
    table = pa.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as out:
        for n, text in enumerate(TEXTS):
            for name, content in ((f"{n}.txt", text), (f"{n}.json", json.dumps({"text": text}))):
                info = tarfile.TarInfo("a" * (n * 5) + name)
                info.size = len(content.encode())
                out.addfile(info, io.BytesIO(content.encode()))
    made = {"a.jsonl": lines, "a.csv": rows.encode(), "a.txt": " ".join(TEXTS).encode(), "a.tar": sink.getvalue()}
    for name in list(made):
        made[f"{name}.gz"] = gzip.compress(made[name])
        made[f"{name}.zst"] = pa.compress(made[name], codec="zstd", asbytes=True)
    for name, codec in (("a", "none"), ("b", "zstd"), ("c", "snappy")):
        at = io.BytesIO()
        pq.write_table(table, at, compression=codec, row_group_size=20)
        made[f"{name}.parquet"] = at.getvalue()
    for name, writer in (("a", pa.ipc.new_file), ("b", pa.ipc.new_stream)):
        for codec in (None, "zstd"):
            buffer = pa.BufferOutputStream()
            with writer(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
                out.write_table(table, max_chunksize=20)
            made[f"{name}{codec or ''}.arrow"] = buffer.getvalue().to_pybytes()
    shared = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, shared.schema) as out:
        out.write_table(shared)
    made["shared.arrow"] = buffer.getvalue().to_pybytes()
    return made


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of damaged files, bombs and folders."""
    for number in range(1 << 62):
        seed = f"{number} {chance.random()}"
        kind = random.Random(seed).choices([_damaged, _bomb, _folder, _saved, _misnamed], [70, 4, 10, 10, 6])[0]
        yield Case(f"{number} {kind.__name__[1:]}", partial(_run, kind, seed))


def _run(kind, seed: str, folder: Path) -> None:
    chance = random.Random(seed)
    source = folder / "sources"
    source.mkdir()
    named = kind(chance, source)
    read_everything(str(named), conversations=chance.random() < 0.1)
    if chance.random() < 0.1:
        from meshwright.data import prepare
        from meshwright.job.data import Data

        prepare(Data(sources=(str(named),), cache=str(folder / "cache")), 300)


def read_everything(source: str, conversations: bool = False) -> None:
    """All documents of a source, as a worker of `data prepare` or of a streaming run reads them."""
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.raw import Bad, Taking, list_inputs, plan_units, read_unit

    chat = ChatTemplate(None, {}, (), "none") if conversations else None
    bad = 0
    for unit in plan_units(list_inputs([source]).files, 1 << 16):
        for item in read_unit(unit, Taking(chat=chat)):
            bad += isinstance(item, Bad)
            if bad > 2000:
                return  # as `data prepare` stops where too many are bad


def _damaged(chance: random.Random, folder: Path) -> Path:
    name = chance.choice(list(whole()))
    path = folder / name
    path.write_bytes(damaged(whole()[name], chance))
    return path


def _misnamed(chance: random.Random, folder: Path) -> Path:
    path = folder / chance.choice(list(whole()))
    raw = whole()[chance.choice(list(whole()))]
    path.write_bytes(
        chance.choice([raw, gzip.compress(raw), gzip.compress(gzip.compress(raw)), b"", chance.randbytes(99)])
    )
    return path


def _bomb(chance: random.Random, folder: Path) -> Path:
    name = chance.choice(
        ["jsonl.gz", "txt.gz", "csv.gz", "tar.gz", "jsonl.zst", "txt.zst", "csv.zst", "tar.zst", "parquet"]
    )
    path, size = folder / f"bomb.{name}", chance.choice(BOMB_MIB)
    unit = chance.choice([b"\n", b" ", b"x", b"\0", b'{"text": "', b"[", b'"a\n', b"a,\n", b"{}\n", b",", b"\xff"])
    mib = (unit * ((1 << 20) // len(unit) + 1))[: 1 << 20]
    if name == "parquet":
        rows = [mib.decode("latin-1")] * size
        pq.write_table(pa.table({"text": rows}), path, compression="zstd", use_dictionary=chance.random() < 0.5)
        return path
    head = b"id,text\n" if "csv" in name else whole()["a.tar"][:512] if "tar" in name else b""
    with gzip.open(path, "wb", 1) if name.endswith("gz") else pa.CompressedOutputStream(str(path), "zstd") as out:
        out.write(head)
        for _ in range(size):
            out.write(mib)
    return path


def _folder(chance: random.Random, folder: Path) -> Path:
    (folder / "good.txt").write_text(TEXTS[0])
    for _ in range(chance.randint(1, 3)):
        path = (
            folder
            / f"{chance.randrange(9)}{chance.choice(['.txt', '.jsonl', '.tar', '.parquet', '.arrow', '.gz', ''])}"
        )
        if path.exists() or path.is_symlink():
            continue
        kind = chance.randrange(7)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(chance.choice(["/etc/passwd", "/dev/zero", "good.txt", "nowhere", "..", str(path.name)]))
        elif kind == 2:
            with socket.socket(socket.AF_UNIX) as bound:
                os.chdir(folder)
                bound.bind(path.name)
        elif kind == 3:
            path.mkdir()
        elif kind == 4:
            path.write_text("x")
            path.chmod(0)
        elif kind == 5:
            path.write_bytes(b"")
        else:
            os.mkfifo(folder / chance.choice(["dataset_dict.json", "state.json", "manifest.json"]))
            return folder
    return folder


def _saved(chance: random.Random, folder: Path) -> Path:
    """A folder as `datasets` saves it, one of its files odd."""
    (folder / "train").mkdir()
    (folder / "train/data.arrow").write_bytes(whole()["b.arrow"])
    told = {"splits": ["train", "test"]}
    state = {"_data_files": [{"filename": "data.arrow"}], "_indices_files": None, "_fingerprint": "x"}
    if chance.random() < 0.5:
        told = damaged_value(told, chance)
    else:
        state = damaged_value(state, chance)
    for path, value in ((folder / "dataset_dict.json", told), (folder / "train/state.json", state)):
        text = (
            json.dumps(value)
            if chance.random() < 0.9
            else chance.choice(["", "[" * 50_000, "{", str(1 << 62), "\ufeff{}"])
        )
        path.write_text(text)
    return folder


ARCHIVES = Family("archives", draw)
