"""A rank's record: groups created, operations issued and waits, in order, one line of JSON each.

Lines are written as things happen, so that a rank that hangs or dies leaves a record of what it did. A rank issues the
same few calls over and over: each is written in full once, and by its number afterwards.
"""

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spec:
    """What is recorded of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool = True
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """Entries."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Operation:
    """One collective, send or receive as a rank issued it."""

    rank: int
    number: int
    """In the order of issue on this rank, over all groups."""
    group: str
    """Torch's name of the group."""
    ranks: tuple[int, ...]
    """Of the group."""
    kind: str
    inputs: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()
    reduce: str | None = None
    peer: int | None = None
    """The global rank on the other side of a send or receive; the root of a collective that has one."""
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Rows to and from each rank of an all_to_all_single; empty where even."""
    asynchronous: bool = False
    batch: int | None = None
    """The call of batch_isend_irecv that it is part of, by its number on this rank."""
    objects: bool = False
    """Whether it carries pickled objects, which stay on the CPU in every job."""
    stream: str = ""
    """On a GPU, whether it was issued on the default stream or on a side stream."""
    thread: int = 0
    site: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.kind in ("send", "recv", "recv_anysource")

    @property
    def tensors(self) -> tuple[Spec, ...]:
        """All that it reads or writes."""
        return self.inputs + self.outputs

    @property
    def what(self) -> str:
        """A description of the operation: kind, tensors, on which group, where."""
        words = [self.kind, *([self.reduce] if self.reduce else []), _written(self.inputs or self.outputs)]
        if self.is_message:
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            words.append(f"{'to' if self.kind == 'send' else 'from'} {other}")
        elif self.peer is not None:
            words.append(f"with root {self.peer}")
        return f"{' '.join(word for word in words if word)} on group {named(self.ranks)} at {self.site}"


@dataclass(frozen=True)
class Creation:
    """A process group that a rank created, or that was created while it took part."""

    rank: int
    name: str
    ranks: tuple[int, ...]
    site: str


@dataclass(frozen=True)
class Wait:
    """A rank waiting for one of its operations."""

    rank: int
    number: int


Event = Operation | Creation | Wait


@dataclass(frozen=True)
class Record:
    """All that one rank did, in order."""

    rank: int
    events: list[Event] = field(default_factory=list)

    @property
    def operations(self) -> list[Operation]:
        """Its collectives and messages."""
        return [event for event in self.events if isinstance(event, Operation)]

    @property
    def creations(self) -> list[Creation]:
        """The groups it created."""
        return [event for event in self.events if isinstance(event, Creation)]


def named(ranks: Sequence[int]) -> str:
    """A group by its ranks."""
    return f"({', '.join(map(str, ranks))})"


class Writer:
    """Writes one rank's record."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.on = True
        """Whether operations are recorded; groups always are."""
        self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()  # autograd's threads issue operations too
        self._issued = 0
        self._calls: dict[tuple[tuple[str, Any], ...], int] = {}

    def created(self, name: str, ranks: Sequence[int], site: str) -> None:
        """A group is about to be created."""
        with self._lock:
            self._write(json.dumps(["group", name, list(ranks), site]))

    def issued(self, call: tuple[tuple[str, Any], ...], batch: int | None) -> int:
        """An operation is about to be issued: those of its fields that have no default. Returns its number."""
        with self._lock:
            known = self._calls.get(call)
            if known is None:
                known = self._calls[call] = len(self._calls)
                self._write(json.dumps(["call", dict(call)]))
            number, self._issued = self._issued, self._issued + 1
            self._write(f'["op",{number},{known}]' if batch is None else f'["op",{number},{known},{batch}]')
        return number

    def waited(self, number: int) -> None:
        """The rank starts to wait for an operation."""
        with self._lock:
            self._write(f'["wait",{number}]')

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")


def read(folder: Path, size: int) -> list[Record]:
    """The records of all ranks as written so far."""
    return [read_one(folder, rank) for rank in range(size)]


def read_one(folder: Path, rank: int) -> Record:
    """One rank's record as written so far."""
    return Record(rank, _events(folder, rank))


def _events(folder: Path, rank: int) -> list[Event]:
    path = _path(folder, rank)
    if not path.exists():  # it died before it started
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # an incomplete last line was cut off when the rank died
    events, calls, members = list[Event](), list[Operation](), dict[str, tuple[int, ...]]()
    for kind, *rest in map(json.loads, lines):
        if kind == "wait":
            events.append(Wait(rank, rest[0]))
        elif kind == "op":
            number, call, *batch = rest
            events.append(replace(calls[call], number=number, batch=batch[0] if batch else None))
        elif kind == "call":
            calls.append(_call(rank, rest[0], members))
        else:
            name, ranks, site = rest
            members[name] = tuple(ranks)
            events.append(Creation(rank, name, members[name], site))
    return events


def _call(rank: int, fields: dict[str, Any], members: dict[str, tuple[int, ...]]) -> Operation:
    """An operation whose number is not yet known."""
    fields |= {side: _specs(fields[side]) for side in ("inputs", "outputs") if side in fields}
    if "splits" in fields:
        fields["splits"] = tuple(map(tuple, fields["splits"]))
    return Operation(rank, -1, ranks=members[fields["group"]], **fields)


def _specs(given: Sequence[list[Any]]) -> tuple[Spec, ...]:
    return tuple(Spec(dtype, tuple(shape), contiguous, device) for dtype, shape, contiguous, device in given)


def _written(specs: Sequence[Spec]) -> str:
    distinct = dict.fromkeys(map(str, specs))
    if len(distinct) == 1 and len(specs) > 1:
        return f"{len(specs)} × {specs[0]}"
    return ", ".join(distinct)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"
