"""One rank of a cluster's job at full size on one device, with the other ranks' messages replaced."""

from meshwright.calls import callable_as
from meshwright.rehearse.compose import compose
from meshwright.rehearse.evidence import Evidence, evidence, mismatches
from meshwright.rehearse.result import Messages, RankMemoryUse, Rehearsal, RehearsedRank, RehearsedStep

__all__ = [
    "Evidence",
    "Messages",
    "RankMemoryUse",
    "Rehearsal",
    "RehearsedRank",
    "RehearsedStep",
    "compose",
    "evidence",
    "mismatches",
]

callable_as(__name__, "meshwright.api.rehearsing", "rehearse")
