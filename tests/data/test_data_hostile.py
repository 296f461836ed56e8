"""Sources made to do harm: bombs, headers that lie, pipes and links; refused by name, in bounded time and memory."""

import gzip
import io
import json
import os
import resource
import struct
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counting import counted_calls

from meshwright.data import prepare
from meshwright.data.chat import ChatTemplate
from meshwright.data.limits import READER_BYTES, bound_memory
from meshwright.data.prepared import workers
from meshwright.data.raw import Bad, Taking, Text, list_inputs, plan_units, read_unit
from meshwright.errors import UserError
from meshwright.job.data import Data

MIB = 1 << 20


def items_of(path: Path, taking: Taking = Taking()):  # noqa: B008
    return [item for unit in plan_units(list_inputs([str(path)]).files) for item in read_unit(unit, taking)]


def prepared(path: Path, **fields):
    return prepare(Data(sources=(str(path),), cache=str(path.parent / "cache"), **fields), 300)


def packed(size_mib: int, compression: str) -> bytes:
    if compression == "gz":
        return gzip.compress(b"\n" * (size_mib * MIB))
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        for _ in range(size_mib):
            stream.write(b"\n" * MIB)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.zst", "a.jsonl.gz"])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(80, name.rpartition(".")[2]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        counted_calls() as calls,
        pytest.raises(UserError, match=rf"{name} unpacks to more than 1000 times its size .*; leave it out"),
    ):
        items_of(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert calls.count < 100_000, calls


@pytest.mark.parametrize("way", ["data prepare", "data.sources"])
def test_empty_lines_cost_next_to_nothing_and_are_counted(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * (24 * MIB) + b' \t\r\n  {"text": "found"}\n\n\n{"text": 3}\n')
    if way == "data prepare":
        with counted_calls() as calls:
            good, bad = items_of(path)
        assert calls.count < 100_000, calls
        assert good.text == "found" and bad == Bad("wrong field", f'{path}:{24 * MIB + 5} (a int in "text")')
    else:
        with pytest.raises(UserError, match=rf"1 wrong field, first at .*a\.jsonl:{24 * MIB + 5} \(a int"):
            prepared(path)


def test_a_line_or_row_without_end_is_named(tmp_path: Path, monkeypatch) -> None:
    from meshwright.data import lines
    from meshwright.data.raw import columns

    monkeypatch.setattr(lines, "LONGEST_RECORD_BYTES", 1000)
    monkeypatch.setattr(columns, "_LONGEST_ROW", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "' + b"x" * 5000 + b'"}\n{"text": "two"}\n')
    assert items_of(path) == [Text("one", 3), Bad("too long", f"{path}:3"), Text("two", 3)]
    with pytest.raises(UserError, match=r"1 too long, first at .*a\.jsonl:3"):
        prepared(path)
    endless = '"never closed ' + "more\n" * 1000
    for text in (f"id,text\n1,{endless}", "id,text\n" + "x" * 5000, endless, "x" * 5000):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(UserError, match=r"b\.csv:\d+ is in a row of more than"):
            items_of(tmp_path / "b.csv")


def test_white_space_without_end_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b" " * (24 * MIB))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with counted_calls() as calls, pytest.raises(UserError, match="holds no text"):
        prepared(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * 1024
    assert calls.count < 100_000, calls


def archive(*members: tuple[str, bytes], end: bool = True) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as out:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return sink.getvalue() if end else sink.getvalue()[: 1024 * len(members)]


def with_size(raw: bytes, offset: int, size: int, kind: bytes = b"0") -> bytes:
    """An archive whose header at an offset claims another size and kind."""
    header = bytearray(raw[offset : offset + 512])
    header[124:136] = b"\x80\0\0\0" + struct.pack(">Q", size) if size >= 0 else b"\xff" * 4 + struct.pack(">q", size)
    header[156:157] = kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return raw[:offset] + bytes(header) + raw[offset + 512 :]


TAR = archive(("a.txt", b"one"), ("b.txt", b"two"), ("c.bin", b"x" * 512))
DAMAGED = {
    "huge member": with_size(TAR, 2048, 1 << 62),
    "huge text": with_size(TAR, 1024, 1 << 62),
    "negative": with_size(TAR, 1024, -512),
    "huge name": with_size(TAR, 1024, 1 << 40, tarfile.GNUTYPE_LONGNAME),
    "huge notes": with_size(TAR, 1024, 1 << 30, tarfile.XHDTYPE),
    "sparse": with_size(TAR, 1024, 3, tarfile.GNUTYPE_SPARSE)[:1700],
    "broken header": TAR[:1100] + b"\xff" * 20 + TAR[1120:],
    "cut between members": archive(("a.txt", b"one"), ("b.txt", b"two"), end=False),
    "cut in a header": TAR[:1200],
    "cut in a member": TAR[:1537],
}


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_archive_is_named(tmp_path: Path, case: str, packing: str) -> None:
    raw = DAMAGED[case]
    (tmp_path / f"a.tar{packing}").write_bytes(gzip.compress(raw) if packing else raw)
    with pytest.raises(UserError, match=r"a\.tar(\.gz)? cannot be read to its end \(.+\); fix or remove it"):
        items_of(tmp_path / f"a.tar{packing}")


def test_members_are_forgotten(tmp_path: Path, monkeypatch) -> None:
    held = []
    following = tarfile.TarFile.next
    monkeypatch.setattr(tarfile.TarFile, "next", lambda self: held.append(len(self.members)) or following(self))
    (tmp_path / "a.tar").write_bytes(archive(*((f"{n}.txt", b"text") for n in range(50))))
    assert len(items_of(tmp_path / "a.tar")) == 50 and max(held) <= 1


def test_one_long_value_that_many_rows_share_is_held_once(tmp_path: Path) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 600, pa.int32()), pa.array(["x" * MIB]))
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", shared.type)])) as out:
        out.write_batch(pa.record_batch([shared], names=["text"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (unit,) = plan_units(list_inputs([str(tmp_path / "a.arrow")]).files)
    sizes: list[int] = [item.size_bytes for item in read_unit(unit, Taking())]
    assert sum(sizes) == 600 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def test_offsets_of_a_table_are_not_trusted(tmp_path: Path) -> None:
    offsets = pa.py_buffer(struct.pack("<4i", 0, 3, 1 << 30, 6))
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"onetwo")])
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", pa.string())])) as out:
        out.write_batch(pa.record_batch([column], names=["text"]))
    with pytest.raises(UserError, match=r"a\.arrow cannot be read to its end"):
        items_of(tmp_path / "a.arrow")


def test_a_table_that_unpacks_out_of_proportion_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["\n" * (100 * MIB)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match=r"a\.parquet unpacks to more than 1000 times its size"):
        items_of(tmp_path / "a.parquet")


def repeated(kind: str, rows: int = 40_000) -> pa.Table:
    """One value of a MiB that all rows share, as a text or as what an assistant says."""
    indices = pa.array([0] * rows, pa.int8())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["word " * (MIB // 5)]))
    if kind == "text":
        return pa.table({"text": texts})
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (rows // 2), pa.int8()), pa.array(["user", "assistant"]))
    said = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(range(0, rows + 1, 2), pa.int32()), said)})


@pytest.mark.parametrize("kind", ["text", "messages"])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_dictionary_that_stands_for_gigabytes_is_refused(tmp_path: Path, kind: str, form: str) -> None:
    path, table = tmp_path / f"a.{form}", repeated(kind)
    if form == "parquet":
        pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=64 * MIB)
    else:
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
            out.write_table(table)
    assert path.stat().st_size < 100_000
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {}, (), "a.jinja")
    before, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    (unit,) = plan_units(list_inputs([str(path)]).files)
    with pytest.raises(UserError, match=rf"a\.{form} unpacks to more than 1000 times its size \(its first rows to"):
        for _ in read_unit(unit, Taking() if kind == "text" else Taking(chat=chat)):
            read += 1
    assert 0 < read < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def test_workers_that_prepare_data_have_bounded_memory(tmp_path: Path, monkeypatch) -> None:
    """The processes are forks, which have the replaced function; this one is not bounded."""
    marker, ours = tmp_path / "bounded", os.getpid()

    def bound() -> None:
        assert os.getpid() != ours
        bound_memory(1024 * MIB)
        try:
            bytearray(2048 * MIB)
        except MemoryError:
            marker.touch()

    monkeypatch.setattr(workers, "bound_memory", bound)
    (tmp_path / "a.txt.gz").write_bytes(
        gzip.compress(b"a text of a few words " * 20)
    )  # small plain text needs no worker
    prepared(tmp_path / "a.txt.gz")
    assert marker.exists() and bound_memory.__defaults__ == (READER_BYTES,)


# ---- what lies in a folder ----


@pytest.mark.parametrize("way", [lambda path: list_inputs([str(path)]), prepared], ids=["data prepare", "data.sources"])
def test_only_regular_files_inside_a_folder_are_read(tmp_path: Path, way) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a text of a few words " * 20)
    (folder / "again.txt").symlink_to("a.txt")
    (tmp_path / "secret.txt").write_text("elsewhere")
    way(folder)

    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt is a pipe, a socket or a device, and only regular files"):
        way(folder)
    (folder / "pipe.txt").unlink()
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"out\.txt leads out of .*texts, to .*secret\.txt, and only regular files"):
        way(folder)
    (folder / "out.txt").unlink()
    (folder / "gone.txt").symlink_to(folder / "nothing.txt")
    with pytest.raises(UserError, match=r"gone\.txt"):
        way(folder)


def test_a_file_that_becomes_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "words"}\n')
    units = plan_units(list_inputs([str(path)]).files)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read to its end \(it is not a regular file\)"):
        list(read_unit(units[0], Taking()))


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "chat_template.jinja"])
def test_files_beside_the_sources_may_not_be_pipes(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    os.mkfifo(folder / name)
    fields = {"tokenizer": str(folder / name)} if name == "tokenizer.json" else {}
    fields |= {"chat_template": str(folder / name), "format": "conversations"} if "chat" in name else {}
    with pytest.raises(UserError):
        prepared(folder, **fields)


METADATA = {
    "a number": "3",
    "no list": '{"splits": 3}',
    "splits of lists": '{"splits": [["train"]]}',
    "no text": "\ufeff\0",
    "deep": "[" * 100_000,
    "long": "[" + "9" * 5000 + "]",
}


@pytest.mark.parametrize("case", METADATA)
def test_odd_metadata_of_a_dataset_is_named(tmp_path: Path, case: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(METADATA[case])
    with pytest.raises(UserError, match=r"dataset_dict\.json"):
        list_inputs([str(tmp_path)])


@pytest.mark.parametrize(
    "files", [3, ["data.arrow"], [{}], [{"filename": 3}], [{"filename": "../x.arrow"}], [{"filename": "\0"}], []]
)
def test_odd_state_of_a_dataset_is_named(tmp_path: Path, files) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "x.arrow").write_bytes(b"")
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(UserError, match=r"state\.json"):
        list_inputs([str(folder)])
