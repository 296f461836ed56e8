"""Randomness of one sample: drawn from (seed, sample number) alone, so that every rank and worker draws the same."""

from meshwright.data.hashing import fraction_of, mix


class Chance:
    """Numbers for one item, each by its order; without a key (for evaluation) there are none to draw."""

    def __init__(self, key: int | None, item: int = 0) -> None:
        self._key = None if key is None else mix(item, key)
        self._drawn = 0

    @property
    def there(self) -> bool:
        """Whether anything may be random."""
        return self._key is not None

    def draw(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number between two others; halfway without a key."""
        if self._key is None:
            return (low + high) / 2
        self._drawn += 1
        return low + (high - low) * fraction_of(self._drawn, self._key)

    def draw_key(self) -> int | None:
        """A key of its own for several things that are to draw alike."""
        if self._key is None:
            return None
        self._drawn += 1
        return mix(self._drawn, self._key)
