"""Small damages that turn a real table, number, text or file into a hostile one; all drawn from the case's chance."""

import random
from typing import Any

HUGE = [2**31, 2**32 + 1, 2**63 - 1, 2**63, 10**30, 10**308, 10**400, int("9" * 4001), -1, -(2**63), 0]
FLOATS = [0.0, -0.0, -1.0, 1e-320, 1e300, 1e308, float("inf"), float("-inf"), float("nan"), 0.1, 1.5]
TEXTS = [
    "",
    " ",
    "x",
    "\0",
    "a\nb",
    "\x1b[31m",
    "é\u202e",
    "\u2028",
    "𝕏" * 50,
    "x" * 5000,
    "../../../etc/passwd",
    "/",
    "/dev/zero",
    "~",
]
TEXTS += [
    "/proc/self/mem",
    "%s%n",
    "{0}",
    "$(id)",
    "'",
    '"',
    "\\",
    "nan",
    "None",
    "true",
    "1e999",
    "auto",
    "-1",
    "https://u:p@h/x",
]
TEXTS += [
    "http://127.0.0.1:1/x?token=1",
    "s3://",
    "file:///etc/passwd",
    "builtin:",
    "builtin:synthetic",
    "a:b:c",
    "cuda:99",
    "c" * 300,
]
TEXTS += ["\ud800"]
NESTED: list[Any] = [
    [],
    {},
    [[]],
    [{}],
    {"a": 1},
    {"": ""},
    [1, "a", None],
    [None],
    [[[[[1]]]]],
    {"a": {"b": {"c": {}}}},
    [0] * 2000,
]
OTHERS: list[Any] = [None, True, False]


def odd_value(chance: random.Random) -> Any:
    """Something that stands where it should not."""
    return chance.choice(chance.choice([HUGE, FLOATS, TEXTS, NESTED, OTHERS]))


def near(value: Any, chance: random.Random) -> Any:
    """The value changed a little, or made something else altogether."""
    if chance.random() < 0.5:
        return odd_value(chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(
            [value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, float(value), str(value)]
        )
    if isinstance(value, float):
        return chance.choice([-value, value * 1e6, value * 1e-6, int(value), str(value)])
    if isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        return value[:at] + chance.choice(TEXTS)[:200] + value[at + chance.randrange(2) :]
    if isinstance(value, list):
        return chance.choice([value[:-1], value * 2, [*value, odd_value(chance)], value[::-1], [value]])
    return odd_value(chance)


def mutated(table: Any, chance: random.Random) -> str:
    """Change one place of nested tables; the name of what was done."""
    places = list(_places(table))
    holder, key = chance.choice(places)
    what = chance.choice(["change", "change", "change", "remove", "add", "rename"])
    if what == "change":
        holder[key] = near(holder[key], chance)
    elif what == "remove":
        del holder[key]
    elif what == "add" and isinstance(holder, dict):
        holder[chance.choice(["x", "", "layers", "файл", "__class__", "a.b", "k" * 3000])] = odd_value(chance)
    elif isinstance(holder, dict):
        holder[chance.choice(["x", str(key).upper(), f"{key}s", f" {key}"])] = holder.pop(key)
    return f"{what} {key}"


def _places(table: Any) -> Any:
    keys = list(table) if isinstance(table, dict) else range(len(table))
    for key in keys:
        yield table, key
        if isinstance(table[key], dict | list) and table[key]:
            yield from _places(table[key])


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, or with others between them."""
    at = chance.randrange(len(content) + 1)
    what = chance.randrange(5)
    if what == 0:
        return content[:at]
    if what == 1:
        return content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
    if what == 2:
        return content[:at] + chance.randbytes(chance.randrange(1, 64)) + content[at:]
    if what == 3:
        return (
            content[:at]
            + chance.choice([b"[" * 20000, b'{"a":' * 20000, b"9" * 6000, b"\0" * 100, b"\xff\xfe"])
            + content[at:]
        )
    return content[:at] + content[at // 2 :]
