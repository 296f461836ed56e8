"""Which window sample i reads: a shuffle that is a formula, so that no table and no history is needed."""

from meshwright.data.hashing import mix

_ROUNDS = 8


def permute(index: int, count: int, key: int) -> int:
    """Where a keyed shuffle of [0, count) sends index: a bijection for every key."""
    if not 0 <= index < count:
        raise IndexError(f"index {index} outside [0, {count})")
    half_bits = ((count - 1).bit_length() + 1) // 2
    value = index
    while True:
        value = _feistel(value, half_bits, key)
        # The network shuffles a power of four that may exceed count; following it until it lands inside
        # [0, count) keeps it a bijection there, in fewer than four turns on average.
        if value < count:
            return value


def window_of(sample: int, windows: int, seed: int, group: int = 1) -> int:
    """The window that sample reads: every window once per epoch, each epoch in an order of its own.

    With a group, so many neighbouring windows come one after the other: shuffled among themselves, and the groups too.
    """
    epoch, index = divmod(sample, windows)
    key = mix(epoch, key=mix(seed))
    if group == 1:
        return permute(index, windows, key)
    groups, rest = divmod(windows, group)
    # The windows that fill no group come last in the epoch; where among the others they lie changes with it.
    rest_at = mix(1, key) % (groups + 1)
    if index >= groups * group:
        return rest_at * group + permute(index - groups * group, rest, mix(2, key))
    number, inside = divmod(index, group)
    number = permute(number, groups, key)
    return number * group + (rest if number >= rest_at else 0) + permute(inside, group, mix(number + 3, key))


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(right, key=key + turn) & mask)
    return left << half_bits | right
