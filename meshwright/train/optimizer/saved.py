"""An optimizer's states as boxes of full tensors: how a checkpoint stores and restores them.

A state is either shaped like its parameter (a moment: sharded as the parameter is), a row of scales for blocks of
columns (8 bits), or replicated on every holder (a step count, Adafactor's means). The names of scales say which columns
share one ("@131x128": runs of 128 in every 131); scales saved with other blocks than today's are re-quantized on load.
"""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Checkpoint, Part
from meshwright.parallel import ShardIndex
from meshwright.train.optimizer.build import Optimizer, parts_of, state_names, states_of
from meshwright.train.optimizer.states import Blocks, block_length, encode

STATES, CODES, SCALES = "optimizer/", ".codes", ".scales"


def saved_states(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], shards: Mapping[str, ShardIndex]
) -> list[Part]:
    """This rank's boxes of its parameters' states; the first holder saves replicated ones."""
    parts, cuts = [], _cuts(optimizer)
    for name, states in states_of(optimizer, masters).items():
        shard, master = shards[name], masters[name]
        for key, values in states.items():
            full = f"{STATES}{name}/{key}"
            if key.endswith(SCALES):
                blocks = Blocks.of(shard.shape[1], cuts[master])
                parts.append(_part(full + _tag(blocks, shard.shape[1]), *_place(blocks, shard), values))
            elif values.shape == master.shape and values.dim() > 0:
                parts.append(_part(full, shard.shape, shard.box(), values))
            elif all(span.start == 0 < span.stop for span in shard.box()):
                parts.append(Part(full, tuple(values.shape), (0,) * values.dim(), values))
    return [part for part in parts if part.values.numel()]


def restore_states(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], shards: Mapping[str, ShardIndex], checkpoint: Checkpoint
) -> None:
    """Restore an optimizer's states for this rank's parameters from a checkpoint, whatever layout saved it."""
    owners = {master: part for part in parts_of(optimizer) for group in part.param_groups for master in group["params"]}
    cuts, saved = _cuts(optimizer), dict[str, list[str]]()
    for full in checkpoint.names(STATES):
        saved.setdefault(parameter_of(full), []).append(full)
    for name, master in masters.items():
        reader = _Reader(checkpoint, shards[name], master.shape[0], cuts[master])
        for full in saved.get(name, ()):
            for key, values in reader.states(full).items():
                # Torch's fused AdamW counts steps on the device, the others count on the host.
                on_host = values.dim() == 0 and not isinstance(owners[master], torch.optim.AdamW)
                owners[master].state[master][key] = values if on_host else values.to(master.device)


def parameter_of(full: str) -> str:
    """The parameter that a saved state belongs to."""
    return full.removeprefix(STATES).rpartition("/")[0]


def missing_states(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], shards: Mapping[str, ShardIndex], saved: Collection[str]
) -> list[str]:
    """The states an optimizer stores for updated parameters that are not among the saved ones."""
    known = {full.partition("@")[0] for full in saved}
    parts = {master: part for part in parts_of(optimizer) for group in part.param_groups for master in group["params"]}
    return [
        full
        for name, master in masters.items()
        if math.prod(shards[name].shape)
        for key in sorted(state_names(parts[master], master))
        if (full := f"{STATES}{name}/{key}") not in known
    ]


class _Reader:
    """Reads the states of one parameter, of which this rank holds a shard of this many rows, including padding."""

    def __init__(self, checkpoint: Checkpoint, shard: ShardIndex, rows: int, cuts: int) -> None:
        self._checkpoint, self._shard, self._rows, self._cuts = checkpoint, shard, rows, cuts

    def states(self, full: str) -> dict[str, Tensor]:
        """The states in a saved tensor, by key; codes come with their scales."""
        key, _, tag = full.rpartition("/")[2].partition("@")
        if key.endswith(CODES):
            return {}
        if not key.endswith(SCALES):
            cut = self._checkpoint.shape(full) == self._shard.shape
            return {key: self._box(full, self._shard.box()) if cut else self._checkpoint.whole(full)}
        moment, columns = key.removesuffix(SCALES), self._shard.shape[1]
        blocks, were = Blocks.of(columns, self._cuts), _tagged(tag, columns)
        codes = self._box(full.partition(SCALES)[0] + CODES, self._shard.box())
        if were == blocks:
            scales = self._box(full, _place(blocks, self._shard)[1])
        else:
            rows, mine = self._shard.box()
            spread = were.spread(self._box(full, (rows, slice(0, were.count(columns)))))[:, mine]
            values, scales = (
                codes * spread,
                codes.new_empty(len(codes), blocks.count(codes.shape[1]), dtype=spread.dtype),
            )
            encode(values, blocks, 0.5, codes, scales)
        return {moment + CODES: codes, moment + SCALES: scales}

    def _box(self, full: str, box: tuple[slice, ...]) -> Tensor:
        values = self._checkpoint.read(full, box)
        padding = self._rows - values.shape[0]
        return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]) if padding else values


def _cuts(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    groups = [group for part in parts_of(optimizer) for group in part.param_groups]
    return {master: group.get("cuts", 1) for group in groups for master in group["params"]}


def _place(blocks: Blocks, shard: ShardIndex) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The shape of a full matrix's scales, and the box of them that a shard has."""
    rows, columns = shard.box()
    return (shard.shape[0], blocks.count(shard.shape[1])), (rows, blocks.span(columns))


def _part(full: str, shape: tuple[int, ...], box: tuple[slice, ...], values: Tensor) -> Part:
    return Part(full, shape, tuple(span.start for span in box), values[: box[0].stop - box[0].start])


def _tag(blocks: Blocks, columns: int) -> str:
    return "" if blocks == _tagged("", columns) else f"@{blocks.unit}x{blocks.length}"


def _tagged(tag: str, columns: int) -> Blocks:
    """The blocks that scales were saved with; "@3" is from older files, where each of 3 ranks had its own blocks."""
    unit, _, length = tag.partition("x")
    if length:
        return Blocks(int(unit), int(length))
    return Blocks.within(columns // int(unit or 1), block_length(columns, columns))
