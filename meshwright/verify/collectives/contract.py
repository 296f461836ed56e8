"""The collective contract of a layout: what the ranks' records show, and what violates it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.verify.collectives.distinct import Calls, distinct, merged
from meshwright.verify.collectives.nccl import refused
from meshwright.verify.collectives.order import collectives_differ, creations_differ, messages_differ
from meshwright.verify.collectives.record import Record
from meshwright.verify.collectives.simulate import Replay


@dataclass(frozen=True)
class Contract:
    """The result of checking the records of all ranks."""

    ranks: int
    operations: int
    """Collectives and messages of all ranks."""
    groups: int
    """Process groups on which something was issued."""
    violations: tuple[str, ...]
    calls: Calls
    """What was issued, each distinct call once."""

    @property
    def ok(self) -> bool:
        """Whether nothing violates it."""
        return not self.violations

    def also(self, other: "Contract") -> "Contract":
        """With the violations and distinct calls of the same layout in another number format."""
        violations = tuple(dict.fromkeys(self.violations + other.violations))
        return replace(self, violations=violations, calls=merged([self.calls, other.calls]))


def prove(records: Sequence[Record]) -> Contract:
    """Check the records of ranks that all finished.

    Whether the ranks agree is checked first: if not, a replay would only show the consequences.
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
        calls=distinct(records),
    )


def prove_so_far(records: Sequence[Record]) -> list[str]:
    """What is wrong in the records of ranks that were stopped; a missing operation may just not have been issued
    yet."""
    violations = creations_differ(records, complete=False)
    if not violations:
        violations = collectives_differ(records, complete=False)
        violations += [] if _from_anyone(records) else messages_differ(records, complete=False)
    return list(dict.fromkeys(violations + refused(records)))


def _from_anyone(records: Sequence[Record]) -> bool:
    """Whether a rank receives from any sender: NCCL refuses that, and messages cannot be matched."""
    return any(operation.kind == "recv_anysource" for record in records for operation in record.operations)
