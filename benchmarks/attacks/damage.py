"""Damage drawn from a seed: odd values, a changed field of a table, corrupt bytes, and things in place of a file."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**32 + 1, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**308, 10**400]
NUMBERS += [int("9" * 4001), 60_000_000, 0.0, -0.0, -1.0, 0.1, 1.5, 5e-324, 1e-320, 1e300, 1e308, -1e308]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
TEXTS = ["", " ", "x", "\0", "a\nb", "\x1b[31m", "é\u202e", "\u2028", "𝕏" * 50, "x" * 10_000, "c" * 300, "\ud800"]
TEXTS += ["../../../etc/passwd", "/", "/dev/zero", "~", "/proc/self/mem", "%s%n", "{0}", "{layer:300000000}", "$(id)"]
TEXTS += ["'", '"', "\\", "nan", "inf", "None", "true", "1e999", "auto", "-1", "<|endoftext|>", "[/bold]", "cuda:99"]
TEXTS += ["https://u:p@h/x", "http://127.0.0.1:1/x?token=1", "s3://", "file:///etc/passwd", "builtin:synthetic"]
TEXTS += ["builtin:", "a:b:c", "<script>alert(1)</script>", "2026-13-45T99:99:99", "0001-01-01T00:00:00+00:00"]
TEXTS += ["9999-12-31T23:59:59+14:00"]
NESTED: list[Any] = [[], {}, [[]], [{}], [1], ["start"], {"a": 1}, {"": ""}, {"": {}}, [1, "a", None], [None]]
NESTED += [[[[[[1]]]]], {"a": {"b": {"c": {}}}}, [0] * 2000, list(range(5000)), {str(n): n for n in range(200)}]
ODD: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *NESTED]
RAW = [b"", b"\n" * 1000, b"[" * 20_000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 20_000, b"\xff\xfe\x00", b"null", b"[]"]
RAW += [b"9" * 400, b"9" * 6000, b'{"step": 1e999}', b"\0" * 4096, b'{"kind": "\\ud800"}', b"NaN", b'"start"', b"{}"]
RAW += [b'{"step": ' + b"1" * 400 + b"}", b'{"x": "' + b"a" * (1 << 20) + b'"}', b'{"step":1,"step":[]}']
RAW += [b"{'step': 1}"]
NAMES = ["x", "", "new", "layers", "файл", "__class__", "a.b", "k" * 3000]


def odd_value(chance: random.Random) -> Any:
    """A value that does not belong there."""
    return copy.deepcopy(chance.choice(chance.choice([NUMBERS, TEXTS, NESTED, ODD])))


def near(value: Any, chance: random.Random) -> Any:
    """The value changed a little, or replaced by something else."""
    if chance.random() < 0.5:
        return odd_value(chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, str(value)])
    if isinstance(value, float):
        return chance.choice([-value, value * 1e6, value * 1e-6, str(value)])
    if isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        return value[:at] + chance.choice(TEXTS)[:200] + value[at + chance.randrange(2) :]
    if isinstance(value, list):
        return chance.choice([value[:-1], value * 2, [*value, odd_value(chance)], value[::-1], [value]])
    return odd_value(chance)


def mutate(table: Any, chance: random.Random) -> str:
    """Change one place of nested tables; what was done."""
    key = chance.choice(list(table)) if isinstance(table, dict) else chance.randrange(len(table))
    if isinstance(table[key], dict | list) and table[key] and chance.random() < 0.9:
        return mutate(table[key], chance)
    what = chance.choice(["change", "change", "change", "remove", "add", "rename"])
    if what == "change" or (what != "remove" and isinstance(table, list)):
        table[key] = near(table[key], chance)
    elif what == "remove":
        del table[key]
    elif what == "add":
        table[chance.choice(NAMES)] = odd_value(chance)
    else:
        table[chance.choice([str(key).upper(), f"{key}s", f" {key}"])] = table.pop(key)
    return f"{what} {key}"


def damaged_value(value: Any, chance: random.Random) -> Any:
    """A JSON value with one place changed."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.05:
        return odd_value(chance)
    value = copy.deepcopy(value)
    mutate(value, chance)
    return value


def damage_json(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """JSON, one value or one per line, with one of its values damaged; what was done, and the result."""
    try:
        return "value", json.dumps(damaged_value(json.loads(data), chance)).encode()
    except (ValueError, RecursionError):
        lines = data.splitlines()
    for _ in range(chance.choice((1, 1, 3, 10)) if lines else 0):
        at, what = chance.randrange(len(lines)), chance.random()
        try:
            changed = json.dumps(damaged_value(json.loads(lines[at]), chance)).encode()
        except (ValueError, RecursionError):
            changed = chance.choice(RAW)
        lines[at] = chance.choice(RAW) if what < 0.3 else changed
        if chance.random() < 0.2:
            lines.insert(at, lines[at])
    return "rows", b"\n".join(lines) + chance.choice((b"\n", b"\n", b""))


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes after one to four small accidents."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        data = chance.choice(ACCIDENTS)(data, at, chance)
    return data


def _flip(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _false_number(data: bytes, at: int, chance: random.Random) -> bytes:
    """An invalid size or offset."""
    number = chance.choice([0, 0xFF, 0x7FFFFFFF, (1 << 62) + 1, (1 << 64) - 1, chance.randrange(1 << 32)])
    width = chance.choice([4, 8])
    return data[:at] + (number % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


ACCIDENTS: list[Callable[[bytes, int, random.Random], bytes]] = [
    _flip,
    _false_number,
    lambda data, at, chance: data[:at],
    lambda data, at, chance: data[:at] + chance.randbytes(chance.randint(1, 64)) + data[at:],
    lambda data, at, chance: data[:at] + chance.choice(RAW) + data[at:],
    lambda data, at, chance: data[:at] + data[at + chance.randint(1, 600) :],
    lambda data, at, chance: data[:at] + data[at // 2 :],
    lambda data, at, chance: data[:at] + data[:512] + data[at + 512 :],
    lambda data, at, chance: data.replace(b"\n", b"\r\n"),
    lambda data, at, chance: data.decode("utf-8", "replace").encode("utf-16"),
]


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 29)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "unreadable": _unreadable,
    "sparse": _sparse,
    "missing": lambda path: None,
}


def damage_file(path: Path, chance: random.Random) -> str:
    """Damage a file on disk; what was done to it."""
    what = chance.random()
    if what < 0.15:
        kind = chance.choice(list(INSTEAD))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        INSTEAD[kind](path)
        return kind
    data = path.read_bytes()
    kind, changed = damage_json(data, chance) if what < 0.75 else ("bytes", damaged(data, chance))
    if what >= 0.95:
        kind, changed = "other contents", chance.choice(RAW)
    path.write_bytes(changed)
    return kind
