"""Files of runs, fed with anything: rows of known types come out, the rest is counted, nothing breaks."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.reading import (
    EVENTS,
    MEMORY,
    METRICS,
    Kind,
    Tally,
    Unfit,
    kept_rows,
    parse_json,
    printable,
    read_object,
    read_plain,
    read_text,
    rows_in,
    stream_rows,
)

KINDS = (METRICS, EVENTS, MEMORY)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(["step", "attempt", "loss", "val_loss", "kind", "elapsed_s", "at", "layer", "step_s", "rank"])
rows = st.dictionaries(names, anything, max_size=8)
lines = st.one_of(
    st.binary(max_size=60).map(lambda data: data.replace(b"\n", b" ")),
    anything.map(lambda value: json.dumps(value).encode()),
    rows.map(lambda row: json.dumps(row).encode()),
    st.integers(0, 10**6).map(lambda step: json.dumps({"step": step, "loss": 2.5, "kind": "start"}).encode()),
)


def is_fit(row: dict[str, Any], kind: Kind) -> bool:
    step = row.get("step", 0)
    if kind is EVENTS:
        return type(row["kind"]) is str and (step is None or type(step) is int)
    loss = row.get("loss", 0.0)
    return type(step) is int and 0 <= step < 2**53 and (loss is None or type(loss) in (int, float))


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.lists(lines, max_size=8), st.sampled_from(KINDS))
def test_every_line_is_a_row_or_counted_however_it_is_read(given_lines: list[bytes], kind: Kind) -> None:
    data = b"".join(line + b"\n" for line in given_lines)
    at_once, one_by_one, streamed, kept = (Tally(kind.name) for _ in range(4))
    found = rows_in(data, kind, at_once)
    single = [row for line in given_lines for row in rows_in(line + b"\n", kind, one_by_one)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, kind.name)
        path.write_bytes(data)
        assert repr(list(stream_rows(path, kind, streamed))) == repr(kept_rows(path, kind, kept)) == repr(found)
    assert repr(found) == repr(single)  # repr: what is not a number is not equal to itself
    assert at_once == streamed == kept and at_once.bad == one_by_one.bad
    assert len(found) + at_once.bad == len(given_lines) == at_once.lines
    assert all(is_fit(row, kind) for row in found)
    json.dumps(found, ensure_ascii=False).encode()  # it can be shown


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
def test_json_is_bounded_or_refused(data: bytes) -> None:
    try:
        value = parse_json(data)
    except Unfit as unfit:
        assert str(unfit)
        return
    flat = [value]
    while flat:
        one = flat.pop()
        flat += [*one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
        assert not isinstance(one, int) or -(2**63) <= one < 2**63
        assert not isinstance(one, float) or not math.isnan(one)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 100_000, "deep"),
        (b"[" * 70 + b"]" * 70, "deep"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "deep"),
        (b"9" * 400, "64 bits"),
        (b"-" + b"9" * 19, "64 bits"),
        (b"9" * 100_000, "64 bits"),
        (b"NaN", "not JSON"),
        (b"-Infinity", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"\xff", "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'"\\ud834"', "half a character"),
    ],
)
def test_why_it_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        parse_json(data)


def test_what_we_write_is_read() -> None:
    assert parse_json(b'{"a": [1e300, 0.30000000000000004, -9223372036854775808, "\\ud834\\udd1e"]}') == {
        "a": [1e300, 0.1 + 0.2, -(2**63), "\U0001d11e"]
    }


def test_of_very_many_rows_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    path, tally = tmp_path / EVENTS.name, Tally(EVENTS.name)
    filler = "x" * 100_000
    with path.open("w") as file:
        for step in range(200):
            file.write(json.dumps({"kind": "note", "step": step, "text": filler}) + "\n")
    steps = [row["step"] for row in kept_rows(path, EVENTS, tally)]
    assert steps[0] == 0 and steps[-1] == 199 and steps == sorted(steps) and len(steps) < 100
    assert tally.left_out == 200 - len(steps)
    assert tally.sentence() == f"{tally.left_out} rows in the middle of events.jsonl are left out"
    some = kept_rows(path, EVENTS, tally, lambda row: row["step"] % 50 == 0)
    assert [row["step"] for row in some] == [0, 50, 100, 150]


def test_a_line_that_never_ends_is_held_by_nobody(tmp_path: Path) -> None:
    path, tally = tmp_path / METRICS.name, Tally(METRICS.name)
    with path.open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.seek(64 << 20, os.SEEK_CUR)  # a hole
        file.write(b'\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in stream_rows(path, METRICS, tally)] == [1, 2]
    assert (tally.lines, tally.bad) == (3, 1) and "line 2: it has more than" in tally.why


def test_only_plain_files_of_a_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}')
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    assert read_object(tmp_path / "file") == {"a": 1} and read_text(tmp_path / "file", 2) == '{"'
    for name in ("pipe", "link", "folder"):
        with pytest.raises(Unfit):
            read_plain(tmp_path / name)
    with pytest.raises(Unfit, match="more than 7 bytes"):
        read_object(tmp_path / "file", 7)
    (tmp_path / "file").write_text("[]")
    with pytest.raises(Unfit, match="not a table"):
        read_object(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nothing")


def test_a_terminal_is_told_nothing_but_text() -> None:
    assert printable("a\x1b[31mb\x07\u202ec") == "a�[31mb��c" and printable("x" * 9, 4) == "xxxx …"
