"""Where every rank of a hanging check is, from incomplete records."""

from collections import Counter
from collections.abc import Sequence

from meshwright.verify.collectives.record import Creation, Operation, Record, Wait, named

Line = tuple[str, int | str, int | str]
"""What is counted to find partners: a group's collectives by rank, its sends and receives by their two ranks."""


def where_ranks_stand(records: Sequence[Record]) -> list[str]:
    """A sentence for each rank: what it waits for and which ranks are missing, or that it is not waiting."""
    issued = Counter(_line(operation) for record in records for operation in record.operations)
    return [_stands(record, issued) for record in records]


def _stands(record: Record, issued: Counter[Line]) -> str:
    who = f"rank {record.rank}"
    if not record.events:
        return f"{who} has created no process group"
    last = record.events[-1]
    if isinstance(last, Creation):
        return f"{who} is creating group {named(last.ranks)} at {last.site}"
    if isinstance(last, Operation):
        return f"{who} is not waiting; the last operation it issued is {last.what}"
    assert isinstance(last, Wait)
    operation = next(op for op in record.operations if op.number == last.number)
    if missing := _missing(operation, record, issued):
        return f"{who} waits at {operation.what}, for rank {', '.join(map(str, missing))}"
    return f"{who} is not waiting; it last waited for {operation.what}, which all ranks have reached"


def _missing(operation: Operation, record: Record, issued: Counter[Line]) -> list[int]:
    """Ranks that have not issued their part of an operation."""
    line = _line(operation)
    place = sum(_line(before) == line for before in record.operations if before.number <= operation.number)
    if operation.is_message:
        assert operation.peer is not None
        return [operation.peer] if issued[_partner(line)] < place else []
    return [rank for rank in operation.ranks if issued[operation.group, rank, ""] < place]


def _line(operation: Operation) -> Line:
    if not operation.is_message:
        return operation.group, operation.rank, ""
    assert operation.peer is not None
    way = (operation.rank, operation.peer) if operation.kind == "send" else (operation.peer, operation.rank)
    return f"{operation.group} {operation.kind}", *way


def _partner(line: Line) -> Line:
    group, kind = line[0].split(" ")
    return f"{group} {'recv' if kind == 'send' else 'send'}", line[1], line[2]
