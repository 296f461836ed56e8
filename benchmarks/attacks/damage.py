"""Damage to a file, drawn from a seed: bytes, lines, JSON values, and what a file may be instead of a file."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**30, 10**400, 1e308, -1e308, 5e-324]
VALUES += [1.5, "", "x", "nan", "inf", "-inf", "NaN", [], {}, [1], ["start"], {"a": 1}, [[[[]]]], "a" * 10_000]
VALUES += ["{layer:300000000}", "%s%n", "<script>alert(1)</script>", "[/bold]", "\x1b[31m", "\x00", "../../etc"]
VALUES += ["2026-13-45T99:99:99", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59+14:00", "\u202e", 60_000_000]
VALUES += [list(range(5000)), {str(number): number for number in range(200)}, float("nan"), float("inf")]
RAW = [b"", b"\n" * 1000, b"[" * 3000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 2000, b"\xff\xfe\x00", b"null", b"[]"]
RAW += [b"9" * 400, b"9" * 5000, b'{"step": 1e999}', b"\x00" * 4096, b'{"kind": "\\ud800"}', b"NaN", b'"start"', b"{}"]
RAW += [
    b'{"step": ' + b"1" * 400 + b"}",
    b'{"x": "' + b"a" * (1 << 20) + b'"}',
    b'{"step":1,"step":[]}',
    b"{'step': 1}",
]


def damage_bytes(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """Some bytes flipped, put in, taken out or doubled."""
    kind = chance.choice(("flip", "cut", "insert", "drop", "repeat", "newlines", "utf-16"))
    at = chance.randrange(len(data) + 1)
    if kind == "flip" and data:
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 8))):
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return kind, bytes(changed)
    if kind == "cut":
        return f"cut at {at}", data[:at]
    if kind == "insert":
        return kind, data[:at] + chance.choice(RAW) + data[at:]
    if kind == "drop":
        return kind, data[:at] + data[at + chance.randrange(1, 40) :]
    if kind == "repeat":
        return kind, data * chance.choice((2, 20))
    if kind == "newlines":
        return kind, data.replace(b"\n", b"\r\n")
    return kind, data.decode("utf-8", "replace").encode("utf-16")


def damage_value(chance: random.Random, value: Any) -> Any:
    """A JSON value with something inside it replaced, taken out or put in."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name, what = chance.choice(list(value)), chance.random()
        rest = {key: inner for key, inner in value.items() if key != name}
        if what < 0.15:
            return rest
        return (
            {**value, "new": chance.choice(VALUES)}
            if what < 0.25
            else value | {name: damage_value(chance, value[name])}
        )
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], damage_value(chance, value[at]), *value[at + 1 :]]
    return chance.choice(VALUES)


def damage_json(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """JSON, of one value or of a value a line, with a value of it damaged."""
    try:
        return "value", json.dumps(damage_value(chance, json.loads(data))).encode()
    except (ValueError, RecursionError):
        lines = data.splitlines()
    for _ in range(chance.choice((1, 1, 3, 10)) if lines else 0):
        at, what = chance.randrange(len(lines)), chance.random()
        try:
            changed = json.dumps(damage_value(chance, json.loads(lines[at]))).encode()
        except (ValueError, RecursionError):
            changed = chance.choice(RAW)
        lines[at] = chance.choice(RAW) if what < 0.3 else changed
        if chance.random() < 0.2:
            lines.insert(at, lines[at])
    return "rows", b"\n".join(lines) + chance.choice((b"\n", b"\n", b""))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 29)


def _missing(path: Path) -> None:
    pass


INSTEAD: list[Callable[[Path], None]] = [
    _pipe,
    _folder,
    _link,
    _link_to_itself,
    _device,
    _unreadable,
    _sparse,
    _missing,
]


def damage_file(chance: random.Random, path: Path) -> str:
    """Damage a file on the disk; what was done to it."""
    what = chance.random()
    if what < 0.15:
        make = chance.choice(INSTEAD)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)
        return make.__name__.strip("_")
    data = path.read_bytes()
    kind, changed = damage_json(chance, data) if what < 0.75 else damage_bytes(chance, data)
    if what >= 0.95:
        kind, changed = "other contents", chance.choice(RAW)
    path.write_bytes(changed)
    return kind
