"""Items on their way from a worker to a batch: pixels as bytes, in shared memory, normalised where they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.data.samples import Items
from meshwright.job.fields import ItemPlan
from meshwright.model import Media


class EncodedItem(NamedTuple):
    """Bytes that become items of a batch where the model is."""

    row: int
    slot: int
    """The first of its slots."""
    field: int
    raw: bytes
    first: int
    """The first of its items that is wanted."""
    wanted: int
    """So many from there on."""
    key: int | None
    """What chance is drawn from, with the number below."""
    number: int
    name: str


@dataclass(frozen=True)
class EncodedMedia:
    """The items of some samples, not decoded yet."""

    plan: ItemPlan
    places_BKT: Tensor
    items: tuple[EncodedItem, ...]


@dataclass(frozen=True)
class CarriedMedia:
    """The items of some samples as they were decoded; B, K and T as in `Media`."""

    items_BK: Tensor
    places_BKT: Tensor
    scale: tuple[Sequence[float], Sequence[float]] | None
    """Mean and deviation of the colours; None where items are as the model takes them."""

    def put(self, place: int, sample: Items) -> list[str]:
        """Decode a sample's items into its row; the names of those that could not be."""
        self.places_BKT[place] = torch.from_numpy(sample.places_KT())
        return sample.fill(self.items_BK[place].numpy())

    def arrived(self) -> Media:
        """The items as the model takes them; empty slots are zero."""
        if self.scale is None:
            return Media(self.items_BK.clone(), self.places_BKT.clone())
        filled_BK = self.places_BKT[..., 0] >= 0
        mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in self.scale)
        items_BK = torch.zeros(self.items_BK.shape, dtype=torch.float32)
        items_BK[filled_BK] = (self.items_BK[filled_BK].float() / 255 - mean) / std
        return Media(items_BK, self.places_BKT.clone())


def carrier_for(sample: Items, samples: int, shared: bool = False) -> CarriedMedia:
    """Room for so many samples like this one, in memory that another process can have."""
    plan = sample.plan
    dtype = torch.uint8 if sample.dtype == np.uint8 else torch.float32
    items_BK = torch.zeros(samples, plan.slots, *plan.shape, dtype=dtype)
    places_BKT = torch.full((samples, plan.slots, plan.tokens), -1)
    for tensor in (items_BK, places_BKT) if shared else ():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return CarriedMedia(items_BK, places_BKT, sample.scale)


def encoded_media(samples: Sequence[Items]) -> EncodedMedia:
    """The bytes of some samples' items."""
    places_BKT = torch.stack([torch.from_numpy(sample.places_KT()) for sample in samples])
    items = [item for row, sample in enumerate(samples) for item in sample.encoded(row)]
    return EncodedMedia(samples[0].plan, places_BKT, tuple(items))
