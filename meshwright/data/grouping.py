"""Things in groups by their size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def grouped_by_size(things: Iterable[T], size: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """Lists of things in order, each ended by the one with which its sizes add up to enough."""
    group: list[T] = []
    total = 0
    for thing in things:
        group.append(thing)
        total += size(thing)
        if total >= enough:
            yield group
            group, total = [], 0
    if group:
        yield group
