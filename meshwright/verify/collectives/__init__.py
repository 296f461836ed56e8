"""The collective contract: what every rank issues, and whether it all matches as NCCL requires."""

from meshwright.verify.collectives.contract import Contract, prove, prove_so_far
from meshwright.verify.collectives.group import record_groups
from meshwright.verify.collectives.record import Creation, Operation, Record, Spec, Wait, read
from meshwright.verify.collectives.waiting import where_ranks_stand

__all__ = [
    "Contract",
    "Creation",
    "Operation",
    "Record",
    "Spec",
    "Wait",
    "prove",
    "prove_so_far",
    "read",
    "record_groups",
    "where_ranks_stand",
]
