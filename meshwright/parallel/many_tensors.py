"""Where a kernel that works on many tensors at once finds them: their addresses, and which block works on which."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' addresses, on their device."""
    found = torch.tensor([tensor.data_ptr() for tensor in tensors])
    device = tensors[0].device
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@lru_cache(maxsize=16)
def blocks_of(counts: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each block's tensor, each tensor's first block, and the sizes of the tensors, of so many entries each."""
    sizes = torch.tensor(counts)
    blocks = (sizes + block - 1) // block
    owners = torch.arange(len(counts)).repeat_interleave(blocks)
    return owners.to(device), (blocks.cumsum(0) - blocks).to(device), sizes.to(device)


def is_aligned(tensor: Tensor) -> bool:
    """Whether size and address are multiples of 16, as kernels that read several entries at a time assume."""
    return tensor.numel() % 16 == 0 and tensor.data_ptr() % 16 == 0
