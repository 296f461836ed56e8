"""Updates of each entry from only its own gradient and moments: a shard is updated just like the full tensor."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel import ShardIndex
from meshwright.train.optimizer.states import Moment, State, format_of

ENTRIES_AT_ONCE = 2**24
"""A large table is updated this many entries at a time, to avoid temporaries of its own size."""

Update = Callable[[Tensor, Sequence[Tensor], int, Mapping[str, Any]], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Rule:
    """What is stored for a parameter, and the function from (gradient, moments, step) to direction and new moments."""

    moments: tuple[Moment, ...]
    update: Update


def adamw() -> Rule:
    """Adam (arXiv:1412.6980) that stores the second moment's root, which needs half the range of the moment itself."""
    return Rule((Moment("first"), Moment("root", signed=False, turn=0.5)), _adamw)


def sgd(momentum: float) -> Rule:
    """Gradient descent with (heavy-ball) momentum; without momentum, nothing is stored."""
    if momentum == 0.0:
        return Rule((), lambda gradient, moments, step, group: (gradient, ()))
    return Rule((Moment("momentum"),), _sgd)


def lion() -> Rule:
    """Lion (arXiv:2302.06675): the sign of a mix of gradient and momentum."""
    return Rule((Moment("momentum"),), _lion)


def _adamw(gradient: Tensor, moments: Sequence[Tensor], step: int, group: Mapping[str, Any]) -> Any:
    (first, root), (beta1, beta2) = moments, group["betas"]
    first = first.lerp(gradient, 1 - beta1)
    root = (root.square() * beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
    denominator = (root / math.sqrt(1 - beta2**step)).add_(group["eps"])
    return (first / denominator).div_(1 - beta1**step), (first, root)


def _sgd(gradient: Tensor, moments: Sequence[Tensor], step: int, group: Mapping[str, Any]) -> Any:
    momentum = moments[0] * group["momentum"] + gradient
    return momentum, (momentum,)


def _lion(gradient: Tensor, moments: Sequence[Tensor], step: int, group: Mapping[str, Any]) -> Any:
    beta1, beta2 = group["betas"]
    return moments[0].lerp(gradient, 1 - beta1).sign_(), (moments[0].lerp(gradient, 1 - beta2),)


class Kept:
    """The moments of one parameter, in the format of its group."""

    def __init__(
        self, master: nn.Parameter, shard: ShardIndex, moments: tuple[Moment, ...], group: Mapping[str, Any]
    ) -> None:
        self._moments, self._master = moments, master
        self._form = format_of(group["format"], shard, master.device, group["cuts"])

    def begin(self, state: State) -> int:
        """Count a step; the first one creates moments of zeros."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            for moment in self._moments:
                self._form.make(state, moment, self._master)
        state["step"] += 1
        return int(state["step"])

    def names(self) -> set[str]:
        """The names in the parameter's state."""
        state: State = {}
        for moment in self._moments:
            self._form.make(state, moment, torch.empty_like(self._master, device="meta"))
        return {"step", *state}

    def read(self, state: State, rows: slice) -> list[Tensor]:
        """The moments of some rows."""
        return [self._form.read(state, moment, rows, self._master.dtype) for moment in self._moments]

    def write(self, state: State, rows: slice, values: Sequence[Tensor]) -> None:
        """Store the new moments of some rows."""
        for moment, new in zip(self._moments, values, strict=True):
            self._form.write(state, moment, rows, new)


class Elementwise(torch.optim.Optimizer):
    """A rule applied to every entry, with decoupled decay; a group's `format` says how its moments are stored."""

    def __init__(
        self, groups: list[dict[str, Any]], rule: Rule, shards: Mapping[nn.Parameter, ShardIndex], **defaults: Any
    ) -> None:
        super().__init__(groups, defaults)
        self._rule = rule
        self._kept = {
            master: Kept(master, shards[master], rule.moments, group)
            for group in self.param_groups
            for master in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._update(master, master.grad.to(master.dtype), group)

    def state_names(self, master: nn.Parameter) -> set[str]:
        """The tensors stored for a parameter."""
        return self._kept[master].names()

    def _update(self, master: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        kept, state = self._kept[master], self.state[master]
        step, rate = kept.begin(state), group["lr"]
        for rows in row_spans(master):
            direction, moments = self._rule.update(gradient[rows], kept.read(state, rows), step, group)
            master[rows].mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
            kept.write(state, rows, moments)


def row_spans(tensor: Tensor) -> Iterator[slice]:
    """A tensor's rows in slices of at most ENTRIES_AT_ONCE entries."""
    if not tensor.numel():
        return
    rows = rows_at_once(tensor)
    for first in range(0, tensor.shape[0], rows):
        yield slice(first, min(first + rows, tensor.shape[0]))


def rows_at_once(tensor: Tensor) -> int:
    """How many rows of a tensor that has some are at most ENTRIES_AT_ONCE entries; at least one."""
    return max(1, ENTRIES_AT_ONCE * tensor.shape[0] // max(tensor.numel(), 1))
