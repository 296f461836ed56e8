"""The collective contract of a layout: what the ranks' records prove, and what breaks it."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.verify.collectives.nccl import refused
from meshwright.verify.collectives.order import collectives_differ, creations_differ, messages_differ
from meshwright.verify.collectives.record import Record
from meshwright.verify.collectives.simulate import Replay


@dataclass(frozen=True)
class Contract:
    """What came of proving the records of all ranks."""

    ranks: int
    operations: int
    """Collectives and messages of all ranks."""
    groups: int
    """Process groups on which something was issued."""
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing breaks it."""
        return not self.violations


def prove(records: Sequence[Record]) -> Contract:
    """Judge the records of ranks that all came to their end.

    Whether the ranks agree comes first: where they do not, a replay would only show what follows from it.
    """
    violations = creations_differ(records)
    if not violations:
        violations = collectives_differ(records) + ([] if _from_anyone(records) else messages_differ(records))
    if not violations and not _from_anyone(records):
        stuck = Replay(records).stuck()
        violations = [f"deadlock: {'; '.join(stuck.values())}"] if stuck else []
    operations = [operation for record in records for operation in record.operations]
    return Contract(
        ranks=len(records),
        operations=len(operations),
        groups=len({(operation.group, operation.ranks) for operation in operations}),
        violations=tuple(dict.fromkeys(violations + refused(records))),
    )


def prove_so_far(records: Sequence[Record]) -> list[str]:
    """What is wrong in the records of ranks that were ended; what has not come may only not have come yet."""
    violations = creations_differ(records, complete=False)
    if not violations:
        violations = collectives_differ(records, complete=False)
        violations += [] if _from_anyone(records) else messages_differ(records, complete=False)
    return list(dict.fromkeys(violations + refused(records)))


def _from_anyone(records: Sequence[Record]) -> bool:
    """Whether a rank receives from whoever sends first: NCCL refuses it, and who meets whom is not known."""
    return any(operation.kind == "recv_anysource" for record in records for operation in record.operations)
