"""The cluster's step from one rank of each kind: measured compute, and wires and schedule as the planner has them.

Nothing of the wire is measured here: what of it is exposed, and what hides behind the measured compute, is computed by
the same formulas as a plan.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import is_asynchronous, table_of
from meshwright.plan import MEASURED, StageCompute, TimedCompute, places_of, predict, stage_kinds
from meshwright.rehearse.charges import differences
from meshwright.rehearse.faster import scaled_to
from meshwright.rehearse.result import RehearsedRank, RehearsedStep

_PASSES = ("forward", "loss", "backward", "forward and backward")
_UPDATE = ("reduce", "optimizer")
"""Without other ranks, what is reduced after the backward is the norm of the gradients."""
_UNEVEN = 1.25
"""How far timers that wait for the device may slow a step down before it is said."""


@dataclass(frozen=True)
class _Rank:
    """A rehearsed rank's seconds, adding up to its step."""

    stages: dict[int, StageCompute]
    """By place along the model."""
    update: float
    rest: float
    loss: float
    """Of the forward, the share of the loss; none in a pipeline."""


def compose(
    job: Job, cluster: Cluster, ranks: Sequence[RehearsedRank], device: str
) -> tuple[RehearsedStep | None, tuple[str, ...]]:
    """The step of the whole cluster, and what there is to say about it; without a step, why there is none.

    `device` is what the ranks were run on. Stages that were not run are taken from ones that compute the same, and
    from no others.
    """
    if why := _why_not(job, ranks):
        return None, (why, *_charges(job, cluster, ranks))
    try:
        scaled, warnings = scaled_to(job, cluster, ranks, device)
        timed = _timed_compute(job, scaled)
        phases = predict(job, cluster, timed=timed).phases
        planned = predict(job, cluster).step_s
    except UserError as error:
        return None, (f"the cluster's step is not known: {error}", *_charges(job, cluster, ranks))
    warnings += (*_slowed(ranks), *_charges(job, cluster, ranks))
    loss = 0.0 if job.layout.pp > 1 else _split(job, scaled[0]).loss
    named = {name: seconds for name, seconds in _named(phases, loss).items() if seconds}
    modelled = tuple(name for name in named if name not in _MEASURED)
    step_s = sum(named.values())
    wire_s = sum(named[name] for name in modelled)
    step = RehearsedStep(step_s, step_s - wire_s, wire_s, named, modelled, planned, job.tokens_per_step / step_s)
    return step, warnings


_MEASURED = ("forward", "loss", "backward", "optimizer", "data and other")


def _named(phases: dict[str, float], loss: float) -> dict[str, float]:
    """The phases of a step as they are shown: the loss apart from the forward."""
    measured = {
        "forward": phases["forward"] * (1 - loss),
        "loss": phases["forward"] * loss,
        "backward": phases["backward"],
        "optimizer": phases["optimizer"],
        "data and other": phases["host"],
    }
    return measured | {name: seconds for name, seconds in phases.items() if name not in MEASURED}


def _why_not(job: Job, ranks: Sequence[RehearsedRank]) -> str | None:
    """Why these ranks make no step."""
    if full := [str(one.rank) for one in ranks if one.state != "measured"]:
        ran = f"rank{'s' if len(full) > 1 else ''} {', '.join(full)} ran out of memory"
        return f"the cluster's step is not known: {ran}"
    if is_asynchronous(job):
        return f"the cluster's step is not known: stages of {job.layout.schedule} do not wait for each other's steps"
    if odd := [one.rank for one in ranks if min(one.step_s, sum(one.phases_s.values())) <= 0]:
        return f"the cluster's step is not known: rank {odd[0]} took no time; rehearse it again"
    if not ranks:
        return "the cluster's step is not known: no rank was rehearsed"
    return None


def _charges(job: Job, cluster: Cluster, ranks: Sequence[RehearsedRank]) -> Iterator[str]:
    """How the messages of the ranks differ from those that are planned."""
    for rank in ranks:
        if rank.state == "measured" and not is_asynchronous(job):
            try:
                yield from differences(job, cluster, rank)
            except UserError:  # the planner does not know the job, or the machine
                return


def _timed_compute(job: Job, ranks: Sequence[RehearsedRank]) -> TimedCompute:
    """The compute of every stage and pipeline rank, from those that were run."""
    # Of several ranks of one pipeline rank, which wait for each other, the slowest.
    found = {rank.pipeline_rank: _split(job, rank) for rank in sorted(ranks, key=lambda rank: rank.step_s)}
    kinds = stage_kinds(job)
    stages: dict[int, list[StageCompute]] = {}
    for own in found.values():
        for place, compute in own.stages.items():
            stages.setdefault(place, []).append(compute)
    like = {kinds[place]: several for place, several in reversed(stages.items())}
    table = table_of(job) if job.layout.pp > 1 else None
    holds = [Counter(kinds[place] for place in places_of(table, one, len(kinds))) for one in range(job.layout.pp)]
    along, rest = [], []
    for place, kind in enumerate(kinds):
        if kind not in like:
            raise UserError(
                f"stage {place} of {len(kinds)} was not rehearsed, and none that was computes the same; rehearse every "
                "kind of rank with --each-stage"
            )
        along.append(_slowest(stages.get(place) or like[kind]))
    for rank, held in enumerate(holds):
        alike = [one for one in found if holds[one] == held]
        if rank not in found and not alike:
            raise UserError(
                f"pipeline rank {rank} was not rehearsed, and none that was holds the same stages; rehearse every kind "
                "of rank with --each-stage"
            )
        rest.append(found[rank if rank in found else alike[0]])
    return TimedCompute(tuple(along), tuple(one.update for one in rest), tuple(one.rest for one in rest))


def _slowest(several: list[StageCompute]) -> StageCompute:
    """Of one stage, measured on several ranks."""
    return max(several, key=lambda one: one.forward + one.backward)


def _split(job: Job, rank: RehearsedRank) -> _Rank:
    """A rank's step by stage and part. Phases and actions were each waited for: their shares count, and the step is as
    long as it was without waiting."""
    pace = rank.step_s / sum(rank.phases_s.values())
    phases = {name: seconds * pace for name, seconds in rank.phases_s.items()}
    passes = sum(phases.get(name, 0.0) for name in _PASSES)
    update = sum(phases.get(name, 0.0) for name in _UPDATE)
    if job.layout.pp == 1:
        forward, loss = phases["forward"] + phases.get("loss", 0.0), phases.get("loss", 0.0)
        one = StageCompute(forward / job.accumulation, phases["backward"] / job.accumulation)
        return _Rank({0: one}, update, rank.step_s - passes - update, loss / forward)
    stages = _actions(job, rank, passes)
    return _Rank(stages, update, rank.step_s - passes - update, 0.0)


def _actions(job: Job, rank: RehearsedRank, passes: float) -> dict[int, StageCompute]:
    """Seconds of a rank's stages over one micro-batch, from those of its actions."""
    table, count = table_of(job), len(stage_kinds(job))
    times = Counter(f"{action.kind.value}{action.stage}" for action in table.orders[rank.pipeline_rank])
    if missing := sorted(set(times) - set(rank.actions_s)):
        raise UserError(f"actions {', '.join(missing)} of rank {rank.rank} were not timed; rehearse it again")
    total = sum(number * rank.actions_s[name] for name, number in times.items())
    if total <= 0:
        raise UserError(f"actions of rank {rank.rank} took no time; rehearse it again")
    pace = passes / total
    stages: dict[int, StageCompute] = {}
    for stage in table.stages_of(rank.pipeline_rank):
        seconds = {kind: pace * rank.actions_s[f"{kind}{stage}"] for kind in "FBIW" if f"{kind}{stage}" in times}
        weights = seconds.get("W")
        halves = seconds.get("I", 0.0) + (weights or 0.0)
        stages[stage % count] = StageCompute(seconds["F"], seconds.get("B") or halves, weights)
    return stages


def _slowed(ranks: Sequence[RehearsedRank]) -> tuple[str, ...]:
    found = []
    for rank in ranks:
        slower = sum(rank.phases_s.values()) / rank.step_s
        if slower > _UNEVEN:
            found.append(
                f"rank {rank.rank} took {slower:.2g} times as long with timers between its phases: its device waits "
                "for its host, and how a step is split into phases is rough"
            )
    return tuple(found)
