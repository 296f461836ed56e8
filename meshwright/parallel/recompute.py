"""Recomputation of blocks: which mode each gets, and forwards that drop what they can make again.

A block's forward is replaced, not wrapped in a module: parameters keep their names, hooks of tensor parallelism inside
a block run again with it, those of `fully_shard` around it do not.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial, wraps
from math import ceil, floor, log10
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Budget, Every
from meshwright.model import KEPT_OPERATIONS, Mode
from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.model.recompute import PROJECTIONS
from meshwright.parallel.activations import holdings_of_rank, stages_of_rank
from meshwright.parallel.budget import ORDER, StageBytes, cheapest, least_bytes, peak_bytes
from meshwright.pipeline import Table

GIB = 2**30


def recompute_modes(job: Job, table: Table | None, rank: int) -> dict[int, Mode]:
    """The mode of every layer a pipeline rank holds; a budget is met by what the rank's stages hold at once."""
    asked = job.memory.recompute
    if isinstance(asked, Budget):
        return _within(job, table, rank, int(asked.budget_gib * GIB))
    if isinstance(asked, Every):
        return {layer: "none" if layer % asked.every else "full" for layer in range(job.model.layers)}
    return dict.fromkeys(range(job.model.layers), asked)


def _within(job: Job, table: Table | None, rank: int, budget: int) -> dict[int, Mode]:
    stages, holdings = _stages(job, table, rank), holdings_of_rank(table, rank)
    counts = cheapest([bytes_of for _, bytes_of in stages], holdings, budget)
    assert counts is not None, "require_recompute refuses smaller budgets"
    modes: dict[int, Mode] = {}
    for (layers, _), own in zip(stages, counts, strict=True):
        in_order = [mode for mode, count in zip(ORDER, own, strict=True) for _ in range(count)]
        modes |= dict(zip(layers, in_order, strict=True))
    return modes


def _stages(job: Job, table: Table | None, rank: int) -> list[tuple[range, StageBytes]]:
    if job.model.file is not None:
        raise UserError(
            f"memory.recompute = {_shown(job.memory.recompute)} counts what blocks save, which model.file = "
            f'{job.model.file} does not tell; set memory.recompute to "selective", "full" or {{every = k}}'
        )
    stages = stages_of_rank(job, table, rank)
    if table is None or not table.splits_backward:
        return stages
    return [(layers, replace(stage, modes={m: stage.modes[m] for m in ("none", "full")})) for layers, stage in stages]


def require_recompute(job: Job, table: Table | None) -> None:
    """Refuse recomputation that a schedule cannot do, and a budget that no choice of blocks meets."""
    asked = job.memory.recompute
    if asked == "none":
        return
    if table is not None and table.schedule == "pipedream":
        raise UserError(
            f"memory.recompute = {_shown(asked)} would run forwards again with newer weights than they had, since "
            'layout.schedule = "pipedream" updates in between; set memory.recompute = "none" or layout.schedule = '
            '"1f1b"'
        )
    if asked == "selective" and table is not None and table.splits_backward:
        raise UserError(
            f'memory.recompute = "selective" keeps its results for one backward, but layout.schedule = '
            f'"{table.schedule}" runs it as two halves; set memory.recompute = "full" or layout.schedule = "1f1b"'
        )
    if isinstance(asked, Budget):
        least, _ = budget_span(job, table)
        if asked.budget_gib * GIB < least:
            lower = " or lower batch.micro_batch" if job.batch.micro_batch > 1 else ""
            raise UserError(
                f"memory.recompute = {_shown(asked)} is less than the fullest rank holds when every block is "
                f"recomputed; set budget_gib to at least {_rounded_up(least / GIB):g}{lower}"
            )


def budget_span(job: Job, table: Table | None) -> tuple[int, int]:
    """Bytes of activations the fullest rank holds, at the least and without recomputation."""
    least = most = 0
    for rank in range(table.ranks if table else 1):
        stages, holdings = [stage for _, stage in _stages(job, table, rank)], holdings_of_rank(table, rank)
        least = max(least, least_bytes(stages, holdings))
        most = max(most, peak_bytes(stages, [(0, 0, stage.blocks) for stage in stages], holdings))
    return least, most


def _shown(asked: object) -> str:
    """The setting as a job file has it."""
    if isinstance(asked, Every):
        return f"{{every = {asked.every}}}"
    return f"{{budget_gib = {asked.budget_gib:g}}}" if isinstance(asked, Budget) else f'"{asked}"'


def _rounded_up(number: float) -> float:
    """To three digits: a budget one can type."""
    step = 10.0 ** (floor(log10(number)) - 2)
    return ceil(number / step) * step


def apply_recompute(model: nn.Module, modes: Mapping[int, Mode], *, keep_last: bool) -> None:
    """Let the blocks of a model recompute, each in its mode, in place.

    `keep_last` says whether something behind a block's last projection (dropout) needs what it made.
    """
    for name, block in cast(nn.ModuleDict, model.layers).items():
        if (mode := modes[int(name)]) == "full":
            block.forward = _recomputing(block.forward, {})
        elif mode == "selective":
            contexts = partial(_selective_contexts, 0 if keep_last else _projections(block))
            block.forward = _recomputing(block.forward, {"context_fn": contexts})


def _projections(block: nn.Module) -> int:
    """Products of a block's forward."""
    joined = sum(module.joined for module in block.modules() if isinstance(module, Attention | FeedForward))
    return sum(isinstance(module, nn.Linear) for module in block.modules()) - joined


def _recomputing(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Dropout is keyed by where and when it is used, so that there is no state of a generator to bring back.
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)
        return result

    return run


def _selective_contexts(last: int) -> Any:
    """Torch's contexts for one pass through a block; the projection of this number is not kept, 0 keeps them all."""
    seen: Counter[bool] = Counter()

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _name(operation)
        if name in PROJECTIONS:
            seen[context.is_recompute] += 1  # some versions of torch ask again while recomputing
        needless = name in PROJECTIONS and seen[context.is_recompute] == last
        keep = name in KEPT_OPERATIONS and not needless
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]


@cache
def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation))
