"""Documents come out of every kind of file alike, whole or in parts, and bad ones are counted with their places."""

import csv
import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from meshwright.data.raw import Bad, Taking, Text, list_inputs, plan_units, read_unit
from meshwright.errors import UserError

TEXTS = [f"document {i} über\n" + "word " * (i % 40) + f"{i}." for i in range(200)]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(TEXTS)).encode()


def write_csv(path: Path, delimiter: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, delimiter=delimiter)
        rows.writerow(["id", "text"])
        rows.writerows(enumerate(TEXTS))


def write_arrow(path: Path, opened) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


def write_tar(path: Path, member) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for number, text in enumerate(TEXTS):
            for suffix, content in {"jpg": b"\xff\xd8", **member(text)}.items():
                entry = tarfile.TarInfo(f"part/{number:06}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def write_parquet(path: Path) -> None:
    text = pa.array(TEXTS).dictionary_encode()
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": text}), path, row_group_size=20)


KINDS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:999]) + gzip.compress(LINES[999:])),
    "a.ndjson.zst": lambda path: path.write_bytes(zstandard.compress(LINES[:999]) + zstandard.compress(LINES[999:])),
    "a.csv": lambda path: write_csv(path, ","),
    "a.tsv": lambda path: write_csv(path, "\t"),
    "semicolons.csv": lambda path: write_csv(path, ";"),
    "tabs.csv": lambda path: write_csv(path, "\t"),
    "bars.csv": lambda path: write_csv(path, "|"),
    "a.parquet": write_parquet,
    "stream.arrow": lambda path: write_arrow(path, pa.ipc.new_stream),
    "file.arrow": lambda path: write_arrow(path, pa.ipc.new_file),
    "texts.tar": lambda path: write_tar(path, lambda text: {"txt": text.encode()}),
    "json.tar.gz": lambda path: write_tar(path, lambda text: {"json": json.dumps({"text": text}).encode()}),
}


def items_of(source: Path | str, unit_bytes: int | None = None, field: str = "text"):
    units = plan_units(list_inputs([str(source)]).files, unit_bytes)
    return [item for unit in units for item in read_unit(unit, Taking(field))], units


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name)
    for unit_bytes in (None, 900, 7_000):
        items, units = items_of(tmp_path / name, unit_bytes)
        assert [item.text for item in items] == TEXTS
        if unit_bytes and name in ("a.jsonl", "a.parquet", "file.arrow"):
            assert len(units) > 1, "a large file of this kind should be parted"
        rest = list(read_unit(units[0], Taking(), skip=3))
        assert rest == list(read_unit(units[0], Taking()))[3:]


@pytest.mark.parametrize(
    "content", ["\n".join(TEXTS), "no line ends, " * 999, "ünbroken" * 999], ids=["lines", "spaces", "none"]
)
def test_a_long_text_file_is_one_document_in_any_parts(tmp_path: Path, content: str, monkeypatch) -> None:
    from meshwright.data.raw import reading

    monkeypatch.setattr(reading, "TEXT_BYTES", 500)
    (tmp_path / "a.txt").write_text(content)
    for unit_bytes in (None, 777, 3_000):
        items, units = items_of(tmp_path / "a.txt", unit_bytes)
        assert "".join(item.text for item in items) == content and (len(units) > 1) == bool(unit_bytes)
        assert [item.begins for item in items].index(True) == 0 and sum(item.begins for item in items) == 1
        assert items[-1].ends and sum(item.ends for item in items) == 1
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    assert "".join(item.text for item in items_of(tmp_path / "a.txt.gz")[0]) == content


def test_bad_documents_are_told_by_kind_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": "cut\n{"body": 1}\n{"text": 5}\n{"text": " "}\n{"text": "caf\xe9"}\n["text"]\n'
        b'{"text": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
    )
    found = [
        (item.kind, item.place.rpartition("/")[2])
        for item in items_of(tmp_path / "a.jsonl")[0]
        if isinstance(item, Bad)
    ]
    assert found == [
        ("broken JSON", "a.jsonl:2"),
        ("wrong field", "a.jsonl:3 (no \"text\", only 'body')"),
        ("wrong field", 'a.jsonl:4 (a int in "text")'),
        ("empty", "a.jsonl:5"),
        ("not UTF-8", "a.jsonl:6"),
        ("wrong field", "a.jsonl:7 (a list and no object)"),
        ("not UTF-8", "a.jsonl:8"),
        ("broken JSON", "a.jsonl:9"),
    ]
    (tmp_path / "b.csv").write_bytes(b"id,text\n1,good\n2\n3,caf\xe9\n4,\n")
    table = pa.table({"text": pa.array([b"good", b"caf\xe9", None, b""]).cast(pa.string(), safe=False)})
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    (tmp_path / "e.txt").write_bytes(b" \n")
    kinds = {
        name: [item.kind for item in items_of(tmp_path / name)[0] if isinstance(item, Bad)]
        for name in ("b.csv", "c.parquet", "d.txt", "e.txt")
    }
    assert kinds["b.csv"] == ["wrong field", "not UTF-8", "empty"]
    assert kinds["c.parquet"] == ["not UTF-8", "empty", "empty"]
    assert kinds["d.txt"] == ["not UTF-8"] and kinds["e.txt"] == ["empty"]


def test_of_a_long_text_file_only_the_bad_piece_is_left_out(tmp_path: Path, monkeypatch) -> None:
    from meshwright.data.raw import reading

    monkeypatch.setattr(reading, "TEXT_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"line one\n" * 30 + b"caf\xe9\n" + b"line two\n" * 30)
    items, _ = items_of(tmp_path / "a.txt")
    assert [item.place for item in items if isinstance(item, Bad)] == [f"{tmp_path}/a.txt at byte 273"]
    texts = [item for item in items if isinstance(item, Text)]
    assert texts[0].begins and texts[-1].ends and 400 < sum(len(text.text) for text in texts) < 546


CUT = {
    "a.jsonl.gz": gzip.compress(LINES)[:-20],
    "a.jsonl.zst": zstandard.compress(LINES)[:-20],
    "a.tar": b"not an archive" * 100,
    "a.parquet": b"PAR1 not a table",
    "a.arrow": b"nothing of the kind",
}


@pytest.mark.parametrize("name", CUT)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CUT[name])
    with pytest.raises(UserError, match=rf"{name} cannot be read to its end \(.+\); fix or remove it"):
        items_of(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('"id";"te""xt";"text"\n1;a;"b;c, d"\n', ["b;c, d"]),
        ('id\ttext\n1\t"a, b; c"\n2\td,e\n', ["a, b; c", "d,e"]),
        ('"two\nlines";text\n1;a\n', ["a"]),
        ("\ufefftext;id\na;1\n", ["a"]),
        ("text\na; b\nc | d\n", ["a; b", "c | d"]),  # one column: nothing separates
        ("text;id;;\na;1;;\nb;2\n", ["a", "b"]),
    ],
)
def test_the_first_line_says_what_separates_columns(tmp_path: Path, content: str, texts: list[str]) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    assert [item.text for item in items_of(tmp_path / "a.csv")[0]] == texts


def test_a_delimiter_that_is_not_clear_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,id;text\na,b;c\n")
    with pytest.raises(UserError, match=r"a\.csv may be separated by commas or semicolons, as its first line has"):
        items_of(path)
    path.write_text("a;b;c\n1;2;3\n")
    with pytest.raises(UserError, match=r'has no column "text" \(its first line has a, b, c\); set data\.text_field'):
        items_of(path)


def test_a_row_with_more_columns_than_the_first_line_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nHello, world\n"Hello, world"\nplain,\n')
    assert items_of(path)[0] == [
        Bad("wrong field", f"{path}:2 (2 columns, 1 in the first line)"),
        Text("Hello, world", 12),
        Text("plain", 5),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "file.arrow"])
def test_a_table_without_the_column_is_refused(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name)
    with pytest.raises(UserError, match=rf'{name} has no column "body" \(.*text.*\); set data.text_field'):
        items_of(tmp_path / name, field="body")


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r'a column "id" of int64 where text is needed'):
        items_of(tmp_path / "a.parquet", field="id")


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.ndjson.zst")])
def test_a_reader_that_is_not_installed_is_named(tmp_path: Path, monkeypatch, module: str, name: str) -> None:
    KINDS[name](tmp_path / name)
    for loaded in [key for key in sys.modules if key.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(UserError, match=rf"{name} needs {module}, which is not installed; run pip install {module}"):
        list_inputs([str(tmp_path / name)])


def test_hugging_face_folders(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    (saved / "test").mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        write_arrow(saved / split / "data-00000-of-00001.arrow", pa.ipc.new_stream)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_files": None}
        (saved / split / "state.json").write_text(json.dumps(state))
    assert [item.text for item in items_of(saved)[0]] == TEXTS
    assert list_inputs([str(saved / "test")]).files[0].name.endswith("test/data-00000-of-00001.arrow")

    (saved / "train/state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(UserError, match=r"selection of rows .*flatten_indices\(\)"):
        list_inputs([str(saved)])
    (saved / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match="has no split named train, only test"):
        list_inputs([str(saved)])

    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("a card, no text to train on")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(hub / "data" / f"{name}.parquet")
    inputs = list_inputs([str(hub)])
    assert [Path(file.name).name[:11] for file in inputs.files] == ["train-00000", "train-00001"]
    assert [Path(name).name[:4] for name in inputs.left_out] == ["READ", "test"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("a.parquet.gz", "is not a supported kind of file; give text"),
        ("pictures", "holds no text, .jsonl, .csv"),
        ("builtin:synthetic", "holds no files to read; choose builtin:stdlib"),
        ("gopher://old/text", "gopher://old/text is not an address fsspec knows"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, monkeypatch, source: str, sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for name in ("a.parquet.gz", "pictures/b.png"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=sentence):
        list_inputs([source])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (unit,) = plan_units(list_inputs([str(tmp_path / "a.jsonl")]).files)
    reading = read_unit(unit, Taking())
    next(reading)
    (tmp_path / "a.jsonl").write_bytes(LINES + LINES)
    with pytest.raises(UserError, match="changed while it was read"):
        list(reading)
