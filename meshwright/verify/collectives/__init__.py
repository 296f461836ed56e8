"""The collective contract: what every rank issues, and whether it all matches as NCCL requires."""

from meshwright.verify.collectives.contract import Contract, prove, prove_so_far
from meshwright.verify.collectives.distinct import Call, Calls, Origin, distinct, merged
from meshwright.verify.collectives.group import record_groups
from meshwright.verify.collectives.one_rank import Outcome, replay
from meshwright.verify.collectives.record import Creation, Operation, Record, Spec, Wait, Writer, read, read_one
from meshwright.verify.collectives.waiting import where_ranks_stand

__all__ = [
    "Call",
    "Calls",
    "Contract",
    "Creation",
    "Operation",
    "Origin",
    "Outcome",
    "Record",
    "Spec",
    "Wait",
    "Writer",
    "distinct",
    "merged",
    "prove",
    "prove_so_far",
    "read",
    "read_one",
    "record_groups",
    "replay",
    "where_ranks_stand",
]
