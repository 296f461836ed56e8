"""Buffers that stages receive into: there from a receive to the use of what came, as in torch 2.15.

Earlier releases allocate one for every micro-batch and direction before the first step and keep them all: with 64
micro-batches 128 hidden states on a stage in the middle, however few are in flight.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

TORCH_KEEPS_BUFFERS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)


def allocate_buffers(received: Iterable[Any], device: torch.device) -> None:
    """Give memory to what is about to be received; torch's descriptions of it carry the shapes."""
    for info in _with_buffer(received):
        info.buffer = _like(info.buffer, device)


def release_buffers(received: Iterable[Any]) -> None:
    """Keep only the shapes; whoever uses what came holds it."""
    for info in _with_buffer(received):
        info.buffer = _like(info.buffer, torch.device("meta"))


def _with_buffer(received: Iterable[Any]) -> Iterator[Any]:
    """Those that another stage sends; tokens of a first stage are not among them."""
    return (info for info in received if TORCH_KEEPS_BUFFERS and isinstance(getattr(info, "buffer", None), Tensor))


def _like(buffer: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
