"""How real bytes are damaged: flips, cuts, repeats, numbers that lie; and odd values for any place in a JSON file."""

import random
from typing import Any

ODD: list[Any] = [None, True, -1, 0, 1 << 62, 1e308, float("nan"), "", "\0", "\ud800", "../../etc/passwd", "x" * 5000]
ODD += [[], {}, [[]], {"": {}}, "/dev/zero", [0] * 1000, "<|endoftext|>"]


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """The bytes after one to four small accidents."""
    found = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        kind = chance.randrange(6)
        if kind == 0 and found:
            found[min(place, len(found) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del found[place:]
        elif kind == 2:
            found[place:place] = chance.randbytes(chance.randint(1, 64))
        elif kind == 3:
            del found[place : place + chance.randint(1, 600)]
        elif kind == 4:  # a size or an offset that lies
            number = chance.choice([0, 0xFF, 0x7FFFFFFF, (1 << 62) + 1, (1 << 64) - 1, chance.randrange(1 << 32)])
            width = chance.choice([4, 8])
            found[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        else:
            found[place : place + 512] = found[:512]
    return bytes(found)


def odd_json(value: Any, chance: random.Random) -> Any:
    """The value with something odd at one place in it."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: odd_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        return [*value[:place], odd_json(value[place], chance), *value[place + 1 :]]
    return chance.choice(ODD)
