"""Replay of all ranks' records as NCCL would run them: does every rank finish?

The model, stricter than a GPU wherever the two differ:

- A rank's program issues its operations in the order of its record, over all groups, and blocks where it waits.
  On a GPU the stream does the waiting; side streams, as fully_shard uses them, wait for less than this.
- It blocks in every collective, asynchronous or not, until all members have joined: NCCL does not promise that
  kernels of two communicators run at the same time. Messages that it has not waited for continue meanwhile.
- A communicator runs a rank's operations in the order they were issued there, one after the other. Collectives and
  batches of messages run on the group's own communicator, a message outside a batch on one of its two ranks, as
  in groups that were created without a device.
- A collective ends when all members have joined it. A send ends when its receive has started, however small it is: NCCL
  may buffer a small message, but does not have to. All messages of a batch start together and end together.
- A communicator is created in its first operation, and the program blocks until all its ranks have reached theirs.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.verify.collectives.record import Event, Operation, Record, Wait, named

Communicator = tuple[str, tuple[int, ...]]
"""A group's name, and the ranks that share the communicator."""


def communicator_of(operation: Operation) -> Communicator:
    """Where NCCL would run it."""
    if operation.is_message and operation.batch is None:
        assert operation.peer is not None
        return operation.group, tuple(sorted((operation.rank, operation.peer)))
    return operation.group, operation.ranks


@dataclass
class _Launch:
    """What starts and ends together: one operation, or the messages of one batch."""

    operations: list[Operation]
    closed: bool
    """Whether the whole of it has been issued."""
    left: set[int] = field(default_factory=set)
    """Numbers of its operations that have not finished."""

    def takes(self, event: Event) -> bool:
        """Whether this is another operation of the same batch."""
        return isinstance(event, Operation) and event.batch == self.operations[0].batch


@dataclass
class _Program:
    """A rank's progress through its record."""

    record: Record
    next: int = 0
    launches: dict[int, _Launch] = field(default_factory=dict)
    """By the number of each operation."""
    batch: _Launch | None = None


class Replay:
    """The records of all ranks, replayed as far as possible."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._programs = {record.rank: _Program(record) for record in records}
        self._queues: dict[Communicator, dict[int, deque[_Launch]]] = defaultdict(dict)
        self._present: dict[Communicator, set[int]] = defaultdict(set)
        while any(self._advance(program) for program in self._programs.values()):
            pass

    def stuck(self) -> dict[int, str]:
        """Where each rank is that did not finish or left operations that never end."""
        sentences = {rank: self._standstill(program) for rank, program in self._programs.items()}
        return {rank: sentence for rank, sentence in sentences.items() if sentence is not None}

    def _advance(self, program: _Program) -> bool:
        """Run one rank's program until it blocks; False if it made no progress."""
        events, start = program.record.events, program.next
        while program.next < len(events):
            event = events[program.next]
            if program.batch is not None and not program.batch.takes(event):
                self._close_batch(program)
            if isinstance(event, Wait):
                if event.number in program.launches and program.launches[event.number].left:
                    break
            elif isinstance(event, Operation):
                if event.number not in program.launches and not self._issue(program, event):
                    break
                if not event.is_message and program.launches[event.number].left:
                    break
            program.next += 1
        if program.next == len(events) and program.batch is not None:
            self._close_batch(program)
            return True
        return program.next > start

    def _issue(self, program: _Program, operation: Operation) -> bool:
        """Put an operation into its communicator's queue; False while that is still being created."""
        communicator = communicator_of(operation)
        present = self._present[communicator]
        present.add(operation.rank)
        if not present.issuperset(communicator[1]):
            return False
        if operation.batch is not None and program.batch is not None:
            launch = program.batch
        else:
            launch = _Launch([], closed=operation.batch is None)
            self._queues[communicator].setdefault(operation.rank, deque()).append(launch)
        launch.operations.append(operation)
        launch.left.add(operation.number)
        program.launches[operation.number] = launch
        if operation.batch is not None:
            program.batch = launch
        else:
            self._run(communicator)
        return True

    def _close_batch(self, program: _Program) -> None:
        assert program.batch is not None
        batch, program.batch = program.batch, None
        batch.closed = True
        self._run(communicator_of(batch.operations[0]))

    def _run(self, communicator: Communicator) -> None:
        """Finish what can finish on a communicator."""
        queues = self._queues[communicator]
        moved = True
        while moved:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue and queue[0].closed}
            moved = _meet(heads) or _gather(heads, len(communicator[1]))
            for rank in heads:
                if not queues[rank][0].left:
                    queues[rank].popleft()

    def _standstill(self, program: _Program) -> str | None:
        events, rank = program.record.events, program.record.rank
        if program.next == len(events):
            left = [op for op in program.record.operations if op.number in program.launches[op.number].left]
            return f"rank {rank} has finished but its {left[0].what} has not" if left else None
        event = events[program.next]
        if isinstance(event, Operation) and event.number not in program.launches:
            ranks = communicator_of(event)[1]
            missing = sorted(set(ranks) - self._present[communicator_of(event)])
            return (
                f"rank {rank} begins with {event.what}, for which NCCL connects ranks {named(ranks)}, but rank "
                f"{', '.join(map(str, missing))} never joins"
            )
        assert isinstance(event, Operation | Wait)
        launch = program.launches[event.number]
        waited = next(op for op in launch.operations if op.number == event.number)
        sentence = f"rank {rank} waits at {waited.what}"
        if (head := self._queues[communicator_of(waited)][rank][0]) is not launch:
            sentence += f", which waits behind its {head.operations[0].what}"
        return sentence


def _meet(heads: dict[int, _Launch]) -> bool:
    """Finish every send whose receive has started, and that receive."""
    waiting: dict[tuple[int, int], list[tuple[_Launch, Operation]]] = defaultdict(list)
    for launch in heads.values():
        for operation in launch.operations:
            if operation.kind == "recv" and operation.number in launch.left:
                assert operation.peer is not None
                waiting[operation.peer, operation.rank].append((launch, operation))
    met = False
    for launch in heads.values():
        for operation in launch.operations:
            if operation.kind == "send" and operation.number in launch.left:
                assert operation.peer is not None
                if partners := waiting[operation.rank, operation.peer]:
                    other, receive = partners.pop(0)
                    other.left.discard(receive.number)
                    launch.left.discard(operation.number)
                    met = True
    return met


def _gather(heads: dict[int, _Launch], members: int) -> bool:
    """Finish a collective that all members have joined."""
    here = [launch for launch in heads.values() if launch.left and not launch.operations[0].is_message]
    if len(here) < members:
        return False
    for launch in here:
        launch.left.clear()
    return True
