"""Pictures, film frames and sound of a batch. B sequences, K slots for items in each, T tokens that one item takes.

An item is one picture, one frame of a film, or one window of sound as log-mel features. Every item of a batch has the
same size, so that shapes are fixed and code is never recompiled; slots that no item fills have places of -1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class Media:
    """What the tokens of a batch refer to, and where an encoder's output takes their place."""

    items_BK: Tensor
    """The items: pictures and frames as (B, K, channels, height, width), sound as (B, K, mels, frames)."""
    places_BKT: Tensor
    """The place in its own sequence (0 … S - 1) of every token of every item, int64; -1 where a slot is empty or a
    token was cut off."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with both tensors changed."""
        return type(self)(change(self.items_BK), change(self.places_BKT))
