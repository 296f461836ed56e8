"""Whether all ranks agree: the same groups, the same collectives in the same order, a partner for every message."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from meshwright.verify.collectives.record import Creation, Operation, Record, Spec, named

Channel = tuple[str, int, int]
"""Group, sender, receiver."""


def creations_differ(records: Sequence[Record], complete: bool = True) -> list[str]:
    """Where ranks create process groups in different orders: the first place each rank differs from rank 0."""
    differing = []
    first, *others = records
    for other in others:
        for place, (ours, theirs) in enumerate(zip_longest(_numbered(first), _numbered(other))):
            if ours is None or theirs is None:
                if complete:
                    differing.append(_missing_creation(place, ours, theirs, first.rank, other.rank))
                break
            if ours.ranks != theirs.ranks:
                differing.append(
                    f"rank {theirs.rank} creates group {named(theirs.ranks)} at {theirs.site} where rank {ours.rank} "
                    f"creates group {named(ours.ranks)} at {ours.site}: every rank must create all groups in the same "
                    "order"
                )
                break
    return differing


def _numbered(record: Record) -> list[Creation]:
    """The groups that torch numbers; those that only their members create have other names."""
    return [creation for creation in record.creations if creation.name.isdigit()]


def _missing_creation(place: int, ours: Creation | None, theirs: Creation | None, first: int, other: int) -> str:
    made = ours or theirs
    assert made is not None
    missing = other if theirs is None else first
    return (
        f"rank {missing} creates no group number {place + 1} where rank {made.rank} creates group {named(made.ranks)} "
        f"at {made.site}: every rank must create all groups in the same order, member or not"
    )


def collectives_differ(records: Sequence[Record], complete: bool = True) -> list[str]:
    """Where two ranks' collectives on a group differ: the first place each member differs from the group's first.

    With records that end early (`complete` is False) a rank that is behind may still catch up.
    """
    differing = []
    for members in _by_group(records).values():
        (leader, ours), *others = members.items()
        for other, theirs in others:
            for place, (one, two) in enumerate(zip_longest(ours, theirs)):
                if one is None or two is None:
                    if complete:
                        differing.append(_missing(one or two, leader if one is None else other, place))
                    break
                if sentence := _difference(one, two):
                    differing.append(sentence)
                    break
    return differing


def _by_group(records: Sequence[Record]) -> dict[str, dict[int, list[Operation]]]:
    """Each group's collectives by member, including members that issue none."""
    groups: dict[str, dict[int, list[Operation]]] = {}
    for record in records:
        for creation in record.creations:
            if record.rank in creation.ranks:
                groups.setdefault(creation.name, {}).setdefault(record.rank, [])
        for operation in record.operations:
            if not operation.is_message:
                groups[operation.group][record.rank].append(operation)
    return groups


def _missing(issued: Operation | None, rank: int, place: int) -> str:
    assert issued is not None
    return (
        f"rank {rank} issues no collective number {place + 1} on group {named(issued.ranks)} where rank {issued.rank} "
        f"issues {issued.what}"
    )


def _difference(one: Operation, two: Operation) -> str | None:
    if _agreed(one) != _agreed(two):
        return f"rank {two.rank} issues {two.what} where rank {one.rank} issues {one.what}"
    if one.kind in ("all_to_all_single", "all_to_all"):
        for source, target in ((one, two), (two, one)):
            sent, expected = _share(source.inputs, source, target, 0), _share(target.outputs, target, source, 1)
            if sent != expected:
                return (
                    f"rank {source.rank} sends {sent} entries to rank {target.rank} in {source.what} where rank "
                    f"{target.rank} expects {expected} at {target.site}"
                )
    return None


def _agreed(operation: Operation) -> tuple[object, ...]:
    """What all members must agree on."""
    kind = operation.kind
    if kind in ("all_to_all_single", "all_to_all"):
        specs: object = tuple(sorted({spec.dtype for spec in operation.tensors}))
    elif kind == "all_gather":
        specs = _sizes(operation.outputs)
    elif kind in ("reduce_scatter", "gather", "gather_into_tensor"):
        specs = _sizes(operation.inputs)
    elif kind == "scatter":
        specs = _sizes(operation.outputs)
    else:
        specs = (_sizes(operation.inputs), _sizes(operation.outputs))
    devices = {spec.device for spec in operation.tensors}
    return kind, specs, operation.reduce, operation.peer, devices


def _sizes(specs: Sequence[Spec]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((spec.dtype, spec.shape) for spec in specs)


def _lengths(specs: Sequence[Spec]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Formats and shapes; a scalar counts as a list of one."""
    return tuple((spec.dtype, spec.shape or (1,)) for spec in specs)


def _share(specs: Sequence[Spec], own: Operation, other: Operation, side: int) -> int:
    """Entries of an all-to-all that go from one rank to another, as one of them sees it."""
    place = own.ranks.index(other.rank)
    if own.kind == "all_to_all":
        return specs[place].numel
    whole = specs[0]
    rows = own.splits[side] if own.splits is not None else ()
    if not rows:
        return whole.numel // len(own.ranks)
    return rows[place] * (whole.numel // max(1, whole.shape[0]))


def messages_differ(records: Sequence[Record], complete: bool = True) -> list[str]:
    """Where a send and its matching receive differ, and which messages have no partner.

    Partners are matched as in NCCL: the n-th send from one rank to another on a group matches the n-th receive
    there, whatever their tags.
    """
    differing = []
    for (_, source, target), (sends, receives) in _channels(records).items():
        for send, receive in zip_longest(sends, receives):
            if send is None or receive is None:
                if complete:
                    left, missing = (send, "receives it") if receive is None else (receive, "sends it")
                    assert left is not None
                    partner = target if receive is None else source
                    differing.append(f"rank {left.rank} issues {left.what} and rank {partner} never {missing}")
                break
            if sentence := _mismatch(send, receive):
                differing.append(sentence)
                break
    return differing


def _channels(records: Sequence[Record]) -> dict[Channel, tuple[list[Operation], list[Operation]]]:
    channels: dict[Channel, tuple[list[Operation], list[Operation]]] = defaultdict(lambda: ([], []))
    for operation in _messages(records):
        assert operation.peer is not None
        if operation.kind == "send":
            channels[operation.group, operation.rank, operation.peer][0].append(operation)
        else:
            channels[operation.group, operation.peer, operation.rank][1].append(operation)
    return channels


def _messages(records: Sequence[Record]) -> Iterator[Operation]:
    for record in records:
        yield from (operation for operation in record.operations if operation.is_message)


def _mismatch(send: Operation, receive: Operation) -> str | None:
    pair = f"rank {send.rank} issues {send.what} where rank {receive.rank} issues {receive.what}"
    if _lengths(send.inputs) != _lengths(receive.outputs):
        return pair
    if send.tag != receive.tag:
        return f"{pair}: tags {send.tag} and {receive.tag}, but NCCL knows no tags and matches by order"
    if (send.batch is None) != (receive.batch is None):
        return f"{pair}: one in a batch and one alone, which NCCL sends through different communicators"
    return None
