"""Everything a run needs to resume exactly: collected on every rank, and restored in any layout."""

from collections.abc import Mapping
from typing import Protocol

import torch

from meshwright.checkpoint import (
    PREFERENCE,
    Checkpoint,
    Facts,
    Part,
    State,
    require_base,
    require_shapes,
)
from meshwright.data import Cursor, Loader, StreamLoader
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model.encoder import is_unused
from meshwright.parallel import ShardIndex, Weights, World
from meshwright.train.bad_steps import BadSteps, RecentLosses
from meshwright.train.expert_load import ExpertLoad
from meshwright.train.feedback import restore_feedback, saved_feedback
from meshwright.train.optimizer import Optimizer, missing_states, parameter_of, restore_states, saved_states
from meshwright.train.outcome import Outcome
from meshwright.train.recorder import Recorder
from meshwright.train.scaling import LossScale


class Trained(Protocol):
    """The parts of a trainer that a checkpoint saves."""

    job: Job
    weights: Weights
    optimizer: Optimizer
    scaling: LossScale
    bad_steps: BadSteps
    outcome: Outcome
    position: int
    expert_load: ExpertLoad | None
    loader: Loader | StreamLoader | None
    recorder: Recorder
    world: World

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens it is trained on."""


def capture(run: Trained) -> State:
    """This rank's shard of the current state: the tensors themselves, not copies."""
    masters, shards = run.weights.masters, run.weights.shards()
    owned = set(owned_shards(shards))
    weights = [part for name in shards for part in _saved_weights(name, shards[name], masters[name])]
    states = saved_states(run.optimizer, masters, shards)
    held = [part.name for part in (*weights, *states)]
    parts = [part for part in weights if part.name.removeprefix("model/") in owned]
    parts += [part for part in states if parameter_of(part.name) in owned]
    if (reduction := run.weights.reduction) is not None:
        parts += saved_feedback(reduction, shards)
    if isinstance(run.loader, StreamLoader) and run.world.leads_data:
        parts += [
            Part(cursor_name(number), (len(cursor),), (0,), torch.tensor(cursor))
            for number, cursor in run.loader.own_cursors().items()
        ]
        held += [cursor_name(number) for number in run.loader.cursors]
    if run.expert_load is not None and run.world.rank == 0:
        preference = run.expert_load.preference_LN
        parts.append(Part(PREFERENCE, tuple(preference.shape), (0, 0), preference))
        held.append(PREFERENCE)
    parts += [
        Part(_generator_name(run.world, kind), tuple(state.shape), (0,), state)
        for kind, state in _generators(run.world).items()
    ]
    scale, outcome = run.scaling.state_dict(), run.outcome
    facts = Facts(
        step=outcome.step,
        tokens=outcome.tokens,
        position=run.position,
        loss=outcome.loss,
        first_val_loss=outcome.first_val_loss,
        val_loss=outcome.val_loss,
        loss_scale=float(scale["scale"]) if run.scaling.dynamic else None,
        good_steps=int(scale["good_steps"]),
        skipped=int(scale["skipped"]),
        recent_losses=run.bad_steps.losses.values(),
        replicas=1 if reduction is None else reduction.replicas,
        data=run.fingerprint,
        base=run.weights.base,
    )
    return State(facts, parts, tuple(held))


def _saved_weights(name: str, shard: ShardIndex, master: torch.Tensor) -> list[Part]:
    """A rank's box of a parameter, if it has rows of it."""
    box = shard.box()
    rows = box[0].stop - box[0].start
    starts = tuple(span.start for span in box)
    return [Part(f"model/{name}", shard.shape, starts, master.detach()[:rows])] if rows else []


@torch.no_grad()
def restore(run: Trained, checkpoint: Checkpoint) -> None:
    """Restore a newly built run from a checkpoint, whatever layout saved it."""
    masters, shards, facts = run.weights.masters, run.weights.shards(), checkpoint.facts
    require_shapes(checkpoint, {name: shard.shape for name, shard in shards.items()}, whole=False)
    require_base(checkpoint, run.job.model, run.weights.base)
    _require_states(run, checkpoint)
    with checkpoint:
        for name, master in masters.items():
            values = checkpoint.read(f"model/{name}", shards[name].box())
            master[: len(values)].copy_(values)
            master[len(values) :].zero_()
        restore_states(run.optimizer, masters, shards, checkpoint)
        restore_feedback(run.weights, run.recorder, checkpoint)
        if run.expert_load is not None:
            run.expert_load.prefer(checkpoint.whole(PREFERENCE))
        _restore_generators(run.world, checkpoint)
    run.weights.refresh()
    if run.scaling.dynamic and facts.loss_scale is not None:
        scale = {"scale": facts.loss_scale, "good_steps": facts.good_steps, "skipped": facts.skipped}
        run.scaling.load_state_dict(scale)
    run.bad_steps.losses = RecentLosses(facts.recent_losses)
    run.position = facts.position
    outcome = run.outcome
    outcome.step, outcome.tokens, outcome.loss = facts.step, facts.tokens, facts.loss
    outcome.first_val_loss, outcome.val_loss = facts.first_val_loss, facts.val_loss


def _require_states(run: Trained, checkpoint: Checkpoint) -> None:
    """Reject a checkpoint that lacks an optimizer state or this rank's generator state, which would be reset."""
    facts, saved = checkpoint.facts, checkpoint.names("optimizer/")
    lacking = missing_states(run.optimizer, run.weights.masters, run.weights.shards(), saved)
    if not saved and (facts.skipped >= facts.step or run.job.run.on_bad_step == "skip"):
        lacking = []  # no update has been applied yet
    if run.job.model.file:  # a parameter that its model does not use has no gradient, and so no state
        kept = {parameter_of(name) for name in saved}
        lacking = [name for name in lacking if parameter_of(name) in kept]
    lacking = [name for name in lacking if not is_unused(run.job.model, parameter_of(name))]
    if checkpoint.index.ranks == run.world.size:
        lacking += sorted({_generator_name(run.world, "cpu")} - checkpoint.index.tensors.keys())
    if lacking:
        raise UserError(
            f"{checkpoint.path} lacks {lacking[0]}, without which the run cannot resume exactly; remove this "
            "checkpoint to resume from the previous one"
        )


CURSORS = "data/cursor/"


def cursor_name(number: int) -> str:
    """The tensor that stores the cursor of a virtual shard."""
    return f"{CURSORS}{number:05d}"


def saved_cursors(checkpoint: Checkpoint) -> dict[int, Cursor]:
    """The cursors of the virtual shards, if the run streams its data."""
    with checkpoint:
        names = checkpoint.names(CURSORS)
        return {int(name.removeprefix(CURSORS)): Cursor(*checkpoint.whole(name).tolist()) for name in names}


def owned_shards(shards: Mapping[str, ShardIndex]) -> list[str]:
    """The parameters this rank saves, of those that several ranks replicate: the bytes are divided among them.

    All holders of a shard hold the same shards and so reach the same answer without communicating.
    """
    loads: dict[int, list[int]] = {}
    owned = set()
    sizes = {name: _entries(shard) for name, shard in shards.items()}
    for name in sorted(shards, key=lambda name: (-sizes[name], name)):
        shard = shards[name]
        load = loads.setdefault(shard.copies, [0] * shard.copies)
        holder = load.index(min(load))
        load[holder] += sizes[name]
        if holder == shard.holder:
            owned.add(name)
    return [name for name in shards if name in owned]


def _entries(shard: ShardIndex) -> int:
    entries = 1
    for span in shard.box():
        entries *= span.stop - span.start
    return entries


def _generators(world: World) -> dict[str, torch.Tensor]:
    """The states of this rank's random generators: ours depends only on step and place, a user's model may use them."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def _generator_name(world: World, kind: str) -> str:
    return f"rng/{world.rank:05d}/{kind}"


def _restore_generators(world: World, checkpoint: Checkpoint) -> None:
    """Restored only with the same number of ranks: another number has other streams anyway."""
    if checkpoint.index.ranks != world.size:
        return
    for kind in _generators(world):
        name = _generator_name(world, kind)
        if name in checkpoint.index.tensors:
            state = checkpoint.whole(name)
            torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state, world.device)
