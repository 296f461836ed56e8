"""Which window sample i reads: a shuffle that is a formula, so that no table and no history is needed."""

from meshwright.data.mixing import mix

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


def window_of(sample: int, windows: int, seed: int) -> int:
    """The window that sample reads: every window once per epoch, each epoch in an order of its own."""
    epoch, index = divmod(sample, windows)
    return permute(index, windows, mix(epoch, key=mix(seed)))


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(right, key=key + turn) & mask)
    return left << half_bits | right
