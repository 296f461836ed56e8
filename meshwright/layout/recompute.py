"""Recomputation of blocks: which mode each gets, and which settings are refused."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor, log10

from meshwright.cost import Mode
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Budget, Every, Segments
from meshwright.layout.activations import holdings_of_rank, stages_of_rank
from meshwright.layout.budget import ORDER, StageBytes, cheapest, least_bytes, most_recomputed_bytes, peak_bytes
from meshwright.layout.stages import split_layers
from meshwright.pipeline import Table

GIB = 2**30


def recompute_modes(job: Job, table: Table | None, rank: int) -> dict[int, Mode]:
    """The mode of every layer a pipeline rank holds; a budget is met by what the rank's stages hold at once."""
    asked = job.memory.recompute
    if isinstance(asked, Budget):
        return _within(job, table, rank, int(asked.budget_gib * GIB))
    if isinstance(asked, Every):
        return {layer: "none" if layer % asked.every else "full" for layer in range(job.model.blocks)}
    if isinstance(asked, Segments) and asked.segments > 1:
        stages = split_layers(job, table.stages // table.parameter_copies if table else 1)
        modes = {layer: mode for own in stages for layer, mode in _in_segments(own, asked.segments)}
        return modes | dict.fromkeys(range(job.model.layers, job.model.blocks), "segment")
    if isinstance(asked, Segments):
        asked = "full"
    return dict.fromkeys(range(job.model.blocks), asked)


def _in_segments(layers: range, blocks: int) -> Iterator[tuple[int, Mode]]:
    """The layers of a stage in segments of this many blocks; the last may be shorter."""
    for place, layer in enumerate(layers):
        yield layer, "joined" if place % blocks else "segment"


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
            f"memory.recompute = {_shown(job.memory.recompute)} needs to know what blocks save, which model.file = "
            f'{job.model.file} does not say; set memory.recompute to "selective", "full" or {{every = k}}'
        )
    stages = stages_of_rank(job, table, rank)
    if table is None or not table.splits_backward:
        return stages
    return [(layers, replace(stage, modes={m: stage.modes[m] for m in ("none", "full")})) for layers, stage in stages]


def require_recompute(job: Job, table: Table | None) -> None:
    """Refuse recomputation that a schedule or a model cannot do, and a budget that no choice of blocks meets."""
    asked = job.memory.recompute
    if asked == "none":
        return
    if table is not None and table.schedule == "pipedream":
        raise UserError(
            f"memory.recompute = {_shown(asked)} would recompute forwards with newer weights than they first used, "
            "since "
            'layout.schedule = "pipedream" updates in between; set memory.recompute = "none" or layout.schedule = '
            '"1f1b"'
        )
    if asked == "selective" and table is not None and table.splits_backward:
        raise UserError(
            f'memory.recompute = "selective" keeps its results for one backward, but layout.schedule = '
            f'"{table.schedule}" splits it into two halves; set memory.recompute = "full" or layout.schedule = "1f1b"'
        )
    if isinstance(asked, Segments) and asked.segments > 1 and job.model.file is not None:
        raise UserError(
            f"memory.recompute = {asked} groups blocks of Meshwright's own decoder, but model.file = {job.model.file} "
            'calls its blocks itself; set memory.recompute = "full"'
        )
    require_budget_counts(job)
    if isinstance(asked, Budget):
        if asked.budget_gib * GIB >= sure_budget(job, table)[0]:
            return
        least, _ = budget_span(job, table)
        if asked.budget_gib * GIB < least:
            lower = " or lower batch.micro_batch" if job.batch.micro_batch > 1 else ""
            raise UserError(
                f"memory.recompute = {_shown(asked)} is less than the fullest rank needs even when every block is "
                f"recomputed; set budget_gib to at least {_rounded_up(least / GIB):g}{lower}"
            )


def require_budget_counts(job: Job) -> None:
    """Refuse a budget for a model whose blocks it does not count."""
    asked = job.memory.recompute
    if isinstance(asked, Budget) and job.model.extra_tokens:
        raise UserError(
            f"memory.recompute = {_shown(asked)} does not count what blocks of model.extra_tokens = "
            f'{job.model.extra_tokens} keep; set memory.recompute to "selective" or "full"'
        )


def budget_span(job: Job, table: Table | None) -> tuple[int, int]:
    """Bytes of activations the fullest rank holds, at the least and without recomputation."""
    least = most = 0
    for rank in range(table.ranks if table else 1):
        stages, holdings = [stage for _, stage in _stages(job, table, rank)], holdings_of_rank(table, rank)
        least = max(least, least_bytes(stages, holdings))
        most = max(most, peak_bytes(stages, [(0, 0, stage.blocks) for stage in stages], holdings))
    return least, most


def sure_budget(job: Job, table: Table | None) -> tuple[int, int]:
    """Bytes of activations the fullest rank holds with every block recomputed, and with none: what is between them can
    be met. Quicker than `budget_span`, whose least may be a little less."""
    least = most = 0
    for rank in range(table.ranks if table else 1):
        stages, holdings = [stage for _, stage in _stages(job, table, rank)], holdings_of_rank(table, rank)
        least = max(least, most_recomputed_bytes(stages, holdings))
        most = max(most, peak_bytes(stages, [(0, 0, stage.blocks) for stage in stages], holdings))
    return least, most


def _shown(asked: object) -> str:
    """The setting as a job file has it."""
    return f'"{asked}"' if isinstance(asked, str) else str(asked)


def _rounded_up(number: float) -> float:
    """To three digits: a budget one can type."""
    step = 10.0 ** (floor(log10(number)) - 2)
    return ceil(number / step) * step
