"""Which document every token belongs to, for attention that stays within documents. B batch, S sequence."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Document numbers of a batch, and a bound on how many there are so that no kernel is given more."""

    ids_BS: Tensor
    """A number for every token; neighbours with equal numbers share a document, rows never do."""
    at_most: int | None = None
    """At most this many documents in the whole batch; by default one for every token. Kernels slow down with the
    number of boundaries given, not with the number of documents there are: 0.8 to 54 times plain attention was
    measured."""
    boundaries: Tensor | None = None
    """Where documents begin in the flattened batch; `bounded` fills it."""

    def bounded(self) -> "Documents":
        """The same with int32 boundaries, at_most + 1 long whatever the documents, so that code is never recompiled.

        Every row starts a document; unused entries repeat the total, which kernels read as empty documents.
        """
        total = self.ids_BS.numel()
        begins = torch.ones_like(self.ids_BS, dtype=torch.bool)
        begins[:, 1:] = self.ids_BS[:, 1:] != self.ids_BS[:, :-1]
        index = torch.arange(total + 1, dtype=torch.int32, device=self.ids_BS.device)
        ordered = torch.where(F.pad(begins.flatten(), (0, 1)), index, total).sort().values
        return replace(self, boundaries=ordered[: (total if self.at_most is None else min(self.at_most, total)) + 1])
