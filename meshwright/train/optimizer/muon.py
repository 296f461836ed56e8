"""Muon (kellerjordan.github.io/posts/muon, arXiv:2502.16982): the momentum of a matrix, orthogonalised.

Every projection is a separate matrix here, so queries, keys and values, gate and up, are orthogonalised separately.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel import ShardIndex
from meshwright.torch_private.arithmetic import foreach_add_, foreach_copy_, foreach_lerp, foreach_lerp_, foreach_mul_
from meshwright.train.optimizer.elementwise import Kept, row_spans
from meshwright.train.optimizer.holders import Holders
from meshwright.train.optimizer.states import Moment

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that brings singular values near 1: steep at zero, so five rounds suffice."""
ROUNDS = 5
AT_ONCE = 2**26
"""Entries of matrices that are orthogonalised together: for a model of 124M parameters the host needs longer to launch
products than a GPU to compute them, and with fewer at a time it needs more of them."""
UPDATE_RMS = 0.2
"""Scale of an update's entries, typical for AdamW: one learning rate and decay then serve both."""


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum of each matrix; the ranks that share the matrices divide the work."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Mapping[nn.Parameter, ShardIndex],
        holders: Holders,
        packed: Mapping[nn.Parameter, int],
        **defaults: Any,
    ) -> None:
        """`packed` says how many matrices, one below the other, a parameter consists of, where it is more than one."""
        super().__init__(groups, defaults)
        self._shards, self._holders, self._packed = shards, holders, packed
        masters = [master for group in self.param_groups for master in group["params"]]
        # Group matrices by size and shape: the ranks' shares of a round are then equal, and of one shape.
        self._order = sorted(masters, key=lambda master: (-math.prod(shards[master].shape), shards[master].shape))
        self._spans = dict(zip(self._order, holders.spans([shards[master] for master in self._order]), strict=True))
        self._kept = {
            master: Kept(master, shards[master], (Moment("momentum"),), group)
            for group in self.param_groups
            for master in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        groups = {master: group for group in self.param_groups for master in group["params"]}
        moving = [master for master in self._order if master.grad is not None]
        for numbers, directions in self._directions(moving, groups):
            alike: dict[tuple[float, float], list[tuple[nn.Parameter, Tensor]]] = {}
            for number, direction in zip(numbers, directions, strict=True):
                master, group = moving[number], groups[moving[number]]
                rows, columns = self._shards[master].shape
                stretch = UPDATE_RMS * math.sqrt(max(rows // self._packed.get(master, 1), columns))
                factors = (1 - group["lr"] * group["weight_decay"], -group["lr"] * stretch)
                alike.setdefault(factors, []).append((master, direction.to(master)))
            for (kept, added), pairs in alike.items():
                foreach_mul_([master for master, _ in pairs], kept)
                foreach_add_([master for master, _ in pairs], [direction for _, direction in pairs], alpha=added)

    def state_names(self, master: nn.Parameter) -> set[str]:
        """The tensors stored for a matrix."""
        return self._kept[master].names()

    def _directions(
        self, masters: list[nn.Parameter], groups: Mapping[nn.Parameter, Any]
    ) -> Iterator[tuple[Sequence[int], Sequence[Tensor]]]:
        def orthogonalised(numbers: Sequence[int], wholes: Sequence[Tensor]) -> list[Tensor]:
            packed = [self._packed.get(masters[number], 1) for number in numbers]
            first, device = masters[0], self._holders.device
            working = _working_format(first, device)
            # What other ranks or the host get is narrow; what stays here is widened in one call, not one per matrix.
            stays = self._holders.alone and first.device == device
            return orthogonalise_all(wholes, packed, working, first.dtype if stays else working)

        return self._holders.on_wholes(
            lambda numbers: self._momenta([masters[number] for number in numbers], groups),
            [self._shards[master].shape for master in masters],
            [self._spans[master] for master in masters],
            orthogonalised,
            AT_ONCE,
        )

    def _momenta(self, masters: list[nn.Parameter], groups: Mapping[nn.Parameter, Any]) -> list[Tensor]:
        """The new Nesterov momenta of some matrices, on the device; where they are sent to other ranks, in the format
        used for orthogonalising."""
        device, rates = self._holders.device, {groups[master]["momentum"] for master in masters}
        exact = all(groups[master]["format"] == "fp32" and master.device == device for master in masters)
        few = sum(master.numel() for master in masters) <= AT_ONCE
        if not (exact and few and len(rates) == 1):
            return [self._momentum(master, groups[master]) for master in masters]
        for master in masters:
            self._kept[master].begin(self.state[master])
        [rate] = rates
        gradients = [master.grad.to(master.dtype) for master in masters if master.grad is not None]
        momenta = [self.state[master]["momentum"] for master in masters]
        foreach_lerp_(momenta, gradients, 1 - rate)
        wide = foreach_lerp(gradients, momenta, rate)
        if self._holders.alone:
            return list(wide)
        ahead = [torch.empty(m.shape, dtype=_working_format(m, device), device=device) for m in masters]
        foreach_copy_(ahead, wide)
        return ahead

    def _momentum(self, master: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """The same of one matrix, whatever its size and its state's format."""
        assert master.grad is not None
        gradient, kept, state = master.grad.to(master.dtype), self._kept[master], self.state[master]
        kept.begin(state)
        device = self._holders.device
        ahead = torch.empty(master.shape, dtype=_working_format(master, device), device=device)
        for rows in row_spans(master):
            [momentum] = kept.read(state, rows)
            momentum = momentum.lerp(gradient[rows], 1 - group["momentum"])
            kept.write(state, rows, [momentum])
            ahead[rows].copy_(gradient[rows].lerp(momentum, group["momentum"]))
        return ahead


def orthogonalise_all(
    parameters: Sequence[Tensor], packed: Sequence[int], working: torch.dtype, result: torch.dtype
) -> list[Tensor]:
    """`orthogonalise` of each parameter, computed in one format and returned in another. The n-th consists of
    `packed[n]` matrices; those of one shape are one batched product instead of one per matrix."""
    by_shape: dict[tuple[torch.Size, int], list[int]] = {}
    for place, (parameter, matrices) in enumerate(zip(parameters, packed, strict=True)):
        by_shape.setdefault((parameter.shape, matrices), []).append(place)
    results = list(parameters)
    for (_, matrices), places in by_shape.items():
        together = torch.cat([parameters[place] for place in places]).to(working)
        whole = orthogonalise(together, matrices * len(places)).to(result)
        for place, part in zip(places, whole.chunk(len(places)), strict=True):
            results[place] = part
    return results


def orthogonalise(matrix: Tensor, matrices: int = 1) -> Tensor:
    """The matrix with its singular values brought near 1 (0.7 to 1.2 unless tiny), by a Newton-Schulz iteration; or
    each of several matrices, one below the other.

    It consists of matrix products of the shorter side, so it suits bf16 and tensor cores.
    """
    a, b, c = COEFFICIENTS
    each = matrix.reshape(matrices, -1, matrix.shape[1])
    tall = each.shape[1] > each.shape[2]
    wide = each.mT if tall else each
    x: Tensor = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).flatten(0, 1)


def _working_format(master: Tensor, device: torch.device) -> torch.dtype:
    """bf16 if there are tensor cores for it; float64 stays float64, for verification."""
    if master.dtype == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    return master.dtype
