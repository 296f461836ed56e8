"""A rank's recorded messages compared with those that its plan charges for: the job itself checks the planner."""

from collections.abc import Iterable

from meshwright.amounts import size
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import table_of
from meshwright.pipeline import Kind, Table
from meshwright.plan import charged, passed_on
from meshwright.rehearse.result import Messages, RehearsedRank

_APART = 0.05
"""How far bytes may differ before it is said: a plan leaves out the messages of the embedding and the head."""
_SMALL = 1_000_000
"""Bytes per step that are not worth a word: sums of scalars, norms."""

SHARED, DATA, EXPERTS, STAGES = "tp and cp", "data-parallel", "expert-parallel", "pipeline"
_PHASES = {
    "tensor and context transfers": SHARED,
    "parameter and gradient transfers": DATA,
    "gradient reduction": DATA,
    "parameter gathering": DATA,
    "rows to experts and back": EXPERTS,
    "gradients between copies": STAGES,
}


def differences(job: Job, cluster: Cluster, rank: RehearsedRank) -> tuple[str, ...]:
    """A sentence for each kind of ranks over which a rehearsed rank passes on more or fewer bytes than are planned."""
    planned = planned_bytes(job, cluster, rank.pipeline_rank)
    recorded = recorded_bytes(job, rank.messages)
    found = []
    for name in dict.fromkeys((*planned, *recorded)):
        own, its = recorded.get(name, 0.0), planned.get(name, 0.0)
        if abs(own - its) > max(_APART * its, _SMALL):
            found.append(
                f"rank {rank.rank} passes on {size(own)} per step to {name} ranks, and the plan charges for "
                f"{size(its)}; the time on the wire is the plan's"
            )
    return tuple(found)


def planned_bytes(job: Job, cluster: Cluster, pipeline_rank: int) -> dict[str, float]:
    """Bytes per step that a rank passes on as the plan has it, by the ranks that it shares them with."""
    found: dict[str, float] = {}
    phases = charged(job, cluster, pipeline_rank)
    for phase, name in _PHASES.items():
        found[_joined(job, name)] = found.get(_joined(job, name), 0.0) + phases.get(phase, 0.0)
    if job.layout.pp > 1:
        found[STAGES] += phases["one send"] * sends_of(table_of(job), pipeline_rank)
    return {name: total for name, total in found.items() if total}


def recorded_bytes(job: Job, messages: Iterable[Messages]) -> dict[str, float]:
    """Bytes per step that a rank passes on as its messages have it, each carried as the planner carries its kind."""
    found: dict[str, float] = {}
    for one in messages:
        name = _joined(job, _shared_with(job, one))
        if one.kind == "recv" or len(one.ranks) < 2:  # what is received was sent by another rank
            continue
        found[name] = found.get(name, 0.0) + one.count * passed_on(one.kind, len(one.ranks), one.bytes)
    return found


def _shared_with(job: Job, one: Messages) -> str:
    """Which kind of ranks a message is for, by what it does and the axes that its group spans."""
    axes = set(one.axis.split("·"))
    if one.kind in ("send", "recv"):
        return SHARED if axes == {"cp"} else STAGES
    if one.kind == "all_to_all":
        return SHARED if axes == {"cp"} and job.layout.cp_method == "ulysses" else EXPERTS
    if axes <= {"tp", "cp"}:
        return SHARED
    return EXPERTS if axes == {"ep"} else STAGES if axes == {"pp"} else DATA


def _joined(job: Job, name: str) -> str:
    """Without replicas, gradients are summed over the ranks that share a sequence: then both are one."""
    alone = job.layout.dp_shard * job.layout.dp_replicate == 1
    return SHARED if alone and job.layout.cp > 1 and name == DATA else name


def sends_of(table: Table, rank: int) -> int:
    """Messages that a pipeline rank sends to others in a step."""
    count = 0
    for action in table.orders[rank]:
        if action.kind is Kind.WEIGHT:
            continue
        chain = table.chain_of(action.stage)
        to = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        count += to in chain and table.stage_ranks[to] != rank
    return count
