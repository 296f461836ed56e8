"""Gradients that are summed over the replicas together: plain, as encoded blocks, or as matrices of low rank."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from meshwright.model.numbers import wide_dtype
from meshwright.parallel.compression.codecs import Codec
from meshwright.parallel.compression.replicas import Replicas, Slice


class Bucket(Protocol):
    """Gradients that are summed together."""

    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """Replace the gradients by their sum over the replicas; yields where there is a transfer to wait for."""


class Plain:
    """Entries summed as they are."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = slices

    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """One all-reduce."""
        values = torch.cat(_parts(gradients, self._slices))
        work = replicas.sum(values)
        yield
        work.wait()
        _put(values, gradients, self._slices)


class Encoded(ABC):
    """Entries in blocks that a codec encodes, with a memory of what it lost."""

    def __init__(self, slices: Sequence[Slice], codec: Codec, memories: Mapping[str, Tensor]) -> None:
        self._slices, self._codec, self._memories = slices, codec, memories

    @abstractmethod
    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """Replace the gradients by their sum over the replicas; yields where there is a transfer to wait for."""

    def _values(self, gradients: Mapping[str, Tensor], chunks: int) -> Tensor:
        """Gradients and memories as blocks, as many for each chunk."""
        flat = torch.cat(_parts(self._memories, self._slices))
        flat += torch.cat(_parts(gradients, self._slices))
        padding = -len(flat) % (chunks * self._codec.block)
        return torch.nn.functional.pad(flat, (0, padding)).view(-1, self._codec.block)

    def _remember(self, unsent: Tensor) -> None:
        # A non-finite gradient spoils its step, which the norm shows; it must not spoil all later steps.
        _put(unsent.nan_to_num_(0.0, 0.0, 0.0).flatten(), self._memories, self._slices)


class Gathered(Encoded):
    """Every replica sends what it encoded to all, and all sum it.

    For sparse entries: the owner of a sum would have to select among them again, and what waits longer is staler.
    """

    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """One exchange; the sum is computed in the same order everywhere."""
        values = self._values(gradients, chunks=1)
        sent = self._codec.encode(values)
        arriving, work = replicas.gather(sent)
        self._remember(values - self._codec.decode(sent, values.dtype))
        yield
        work.wait()
        total = torch.zeros_like(values)
        for payload in arriving.chunk(replicas.size):
            total += self._codec.decode(payload, values.dtype)
        _put(total.flatten(), gradients, self._slices)


class Owned(Encoded):
    """n replicas split a bucket into n chunks and own one each, whose sum they encode for all."""

    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """Every chunk goes to its owner, who computes the sum and sends it to all."""
        codec = self._codec
        values = self._values(gradients, replicas.size)
        dtype, blocks = values.dtype, len(values) // replicas.size
        own = slice(replicas.rank * blocks, (replicas.rank + 1) * blocks)

        sent = codec.encode(values)
        arriving, work = replicas.exchange(sent)
        unsent = values - codec.decode(sent, dtype)
        yield
        work.wait()

        total = values[own]  # what stays here need not be encoded
        for replica, payload in enumerate(arriving.chunk(replicas.size)):
            if replica != replicas.rank:
                total += codec.decode(payload, dtype)
        sent = codec.encode(total)
        arriving, work = replicas.gather(sent)
        unsent[own] = total - codec.decode(sent, dtype)
        self._remember(unsent)
        yield
        work.wait()
        _put(codec.decode(arriving, dtype).flatten(), gradients, self._slices)


class LowRank:
    """Matrices of one shape as products of two thin ones (PowerSGD, Vogels et al. 2019), with a memory of the rest.

    M ≈ P·Qᵀ: the columns of P span the most of ΣM that as many columns can, found by one power iteration a step that
    starts where the last one ended.
    """

    def __init__(self, names: Sequence[str], memories: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> None:
        self._names, self._memories, self._starts = names, memories, starts

    def reduce(self, gradients: Mapping[str, Tensor], replicas: Replicas) -> Iterator[None]:
        """Agree on P, then sum the Q of all replicas."""
        memories = torch.stack([self._memories[name].flatten(1) for name in self._names])
        matrices = memories + torch.stack([gradients[name].flatten(1) for name in self._names])
        starts = torch.stack([self._starts[name] for name in self._names])

        left = matrices @ starts
        work = replicas.sum(left)
        yield
        work.wait()
        # Householder's method gives orthonormal columns even where the matrix has a lower rank than asked for.
        left = torch.linalg.qr(left).Q
        right = matrices.mT @ left
        unsent = (matrices - left @ right.mT).nan_to_num_(0.0, 0.0, 0.0)
        work = replicas.sum(right)
        yield
        work.wait()
        summed = left @ right.mT
        finite = right.isfinite().all(dim=(1, 2), keepdim=True)
        starts = torch.where(finite, right, starts)  # one non-finite value must not persist forever
        for place, name in enumerate(self._names):
            self._memories[name].copy_(unsent[place].view_as(self._memories[name]))
            self._starts[name].copy_(starts[place])
            gradients[name].copy_(summed[place].view_as(gradients[name]))


def pays(tensor: Tensor, rank: int) -> bool:
    """Whether two thin matrices are fewer numbers than the whole."""
    if tensor.dim() < 2 or not tensor.numel():
        return False
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    return rank * (rows + columns) < rows * columns


def first_start(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Random directions, the same on all replicas."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    start = torch.randn(prod(tensor.shape[1:]), rank, generator=generator, dtype=torch.float64)
    return start.to(tensor.device, wide_dtype(tensor.dtype))


def alike(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[list[str]]:
    """Names of tensors of one shape, in groups of at most a size or of one."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        shapes.setdefault(tuple(tensor.shape), []).append(name)
    for names in shapes.values():
        first = tensors[names[0]]
        most = max(1, limit_bytes // (first.numel() * first.element_size()))
        for start in range(0, len(names), most):
            yield names[start : start + most]


def _parts(tensors: Mapping[str, Tensor], slices: Sequence[Slice]) -> list[Tensor]:
    return [tensors[part.name].view(-1)[part.start : part.stop] for part in slices]


def _put(flat: Tensor, tensors: Mapping[str, Tensor], slices: Sequence[Slice]) -> None:
    """Copy values to where they came from; padding at the end is left out."""
    place = 0
    for target in _parts(tensors, slices):
        target.copy_(flat[place : place + len(target)])
        place += len(target)
