"""The interface to a model's weights, and its one-device form: fp32 masters and, below fp32, a working copy of them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.job import Job
from meshwright.layout import updates_in_one_pass
from meshwright.parallel.offload.host import TRAFFIC
from meshwright.parallel.shard_index import ShardIndex, shard_index_of
from meshwright.torch_private.arithmetic import foreach_copy_, foreach_norm

if TYPE_CHECKING:
    from meshwright.parallel.compression.weights import Reduction

WIDENED_AT_ONCE = 8
"""Masters whose 16-bit gradients are widened together for an update: about a layer's. A count, not a size, so that
ranks with shards of unequal size take the same ones together."""


def one_pass_here(job: Job, device: torch.device) -> bool:
    """Whether a job's update is one pass over memory on this device, with its software."""
    return device.type == "cuda" and HAS_TRITON and updates_in_one_pass(job)


class Updates(Protocol):
    """What an optimizer must do: update every master that has a gradient, and no other."""

    def step(self) -> Any:
        """Take one step."""


@runtime_checkable
class UpdatesAll(Updates, Protocol):
    """One that reads gradients in any format and writes the working copies itself."""

    writes_working_copies: bool


class Weights:
    """What the loop needs of a model's weights, on one device or as one rank's shards."""

    masters: dict[str, nn.Parameter]
    """What the optimizer updates, by the parameters' names: plain tensors of this device, or in its host's memory."""
    copied: Sequence[nn.Parameter] = ()
    """Parameters in the masters' format that follow masters of another stage: they have no optimizer states."""
    frozen: Mapping[str, Tensor] = MappingProxyType({})
    """What is not trained, by the parameters' names, in the format the model computes with: neither masters nor
    gradients nor optimizer states exist for it."""
    frozen_shards: Mapping[str, ShardIndex] = MappingProxyType({})
    """Where each of those is in its whole parameter."""
    base: str = ""
    """Fingerprint of what is not trained, if adapters are; see `base_fingerprint`."""
    working: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    """What the model computes with, by master, where that is not the master itself and an optimizer may write it."""
    reduction: "Reduction | None" = None
    """Sums gradients over replicas where they are compressed, and remembers what it did not send."""
    _shards: dict[str, ShardIndex]

    def start_step(self, step: int) -> None:
        """Called before the first micro-batch of a step."""

    def start_micro_batch(self, last: bool) -> None:
        """Called before every micro-batch of a step."""

    def collect_gradients(self) -> None:
        """Called after the last backward: the masters have their gradients then."""

    def update(self, optimizer: Updates) -> None:
        """One step of the optimizer, and working copies that follow it."""
        started = time.perf_counter()
        self._update(optimizer)
        TRAFFIC.update_s += time.perf_counter() - started

    def _update(self, optimizer: Updates) -> None:
        if isinstance(optimizer, UpdatesAll):
            optimizer.step()
        else:
            make_step(optimizer, self.masters.values())
            self.refresh()

    def refresh(self) -> None:
        """Called after the masters changed."""

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            master.grad = None

    def shards(self) -> dict[str, ShardIndex]:
        """Where each master is in its whole parameter."""
        return self._shards

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm: the sum over all ranks is the whole."""
        return square_sum(self.masters, self._shards)


class WholeWeights(Weights):
    """The weights of a model on one device; the model computes with them, or with a working copy in lower precision.

    Gradients of the working copy are moved into the masters' gradients as soon as backward computes them, so that no
    second set of gradients stays alive and accumulation over micro-batches adds in the format of `gradients`: the
    masters' own by default.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, gradients: torch.dtype | None = None) -> None:
        self.masters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shards = {name: shard_index_of(p, tuple(p.shape)) for name, p in self.masters.items()}
        self.frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self.frozen_shards = {name: shard_index_of(p, tuple(p.shape)) for name, p in self.frozen.items()}
        self.working: dict[nn.Parameter, Tensor] = {}
        if any(compute != p.dtype for p in self.masters.values()):
            self._split(compute, gradients)

    def _split(self, compute: torch.dtype, gradients: torch.dtype | None) -> None:
        for name, parameter in list(self.masters.items()):
            master = nn.Parameter(parameter.data)
            master.grad_dtype = gradients or master.dtype
            parameter.data = parameter.data.to(compute)
            parameter.register_post_accumulate_grad_hook(move_gradient_to(master))  # type: ignore[no-untyped-call]
            self.masters[name] = master
            self.working[master] = parameter

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive the working copy again."""
        if self.working:
            foreach_copy_(list(self.working.values()), list(self.working))


def square_sum(masters: dict[str, nn.Parameter], shards: dict[str, ShardIndex]) -> Tensor:
    """Σ gradient² over the masters in float64, each divided by the number of ranks that hold the same shard."""
    named = {name: master.grad for name, master in masters.items() if master.grad is not None}
    if not named:  # as on a pipeline stage where nothing is trained
        device = next((master.device for master in masters.values()), None)
        return torch.zeros((), dtype=torch.float64, device=device)
    first, gradients = next(iter(named)), [(gradient, shards[name].copies) for name, gradient in named.items()]
    wide = masters[first].dtype
    if named[first].is_cuda and HAS_TRITON and wide == torch.float32:
        return _square_sum_on_gpu(gradients)
    return _square_sum_of(gradients, wide)


def _square_sum_on_gpu(gradients: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The same by a kernel for all gradients of one format; those that it cannot read by torch's norms."""
    from meshwright.parallel.norm_kernel import may_sum, square_sum_of_many

    by_format: dict[torch.dtype | None, list[tuple[Tensor, int]]] = {}
    for gradient, copies in gradients:
        by_format.setdefault(gradient.dtype if may_sum(gradient) else None, []).append((gradient, copies))
    apart = by_format.pop(None, [])
    sums = [square_sum_of_many(*zip(*alike, strict=True)) for alike in by_format.values()]
    return torch.stack([*sums, *([_square_sum_of(apart, torch.float32)] if apart else [])]).sum()


def _square_sum_of(gradients: Sequence[tuple[Tensor, int]], wide: torch.dtype) -> Tensor:
    """The same by torch's norms, in the masters' format: a norm in 16 bits would be off in its third digit."""
    tensors, copies = [gradient for gradient, _ in gradients], [count for _, count in gradients]
    if tensors[0].is_cpu:
        norms = torch.stack([norm(gradient, wide) for gradient in tensors]).double()
    else:
        norms = torch.stack(foreach_norm(tensors, 2, wide)).double()
    if set(copies) == {1}:  # spares a GPU the wait for a copy from the host
        return norms.square().sum()
    return (norms.square() / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()


def norm(tensor: Tensor, wide: torch.dtype | None = None) -> Tensor:
    """A tensor's norm in float64, by rows: a CPU sums in the tensor's format, which over 60M entries loses 1 %."""
    rows: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=wide).double()
    whole: Tensor = rows.norm()
    return whole


def make_step(optimizer: Any, masters: Iterable[nn.Parameter]) -> None:
    """One step of an optimizer, which needs gradients in the masters' format.

    Narrower ones are widened a few at a time, since an optimizer skips what has no gradient; they are freed
    afterwards.
    """
    narrow = [(master, master.grad) for master in masters if master.grad is not None]
    if all(gradient.dtype == master.dtype for master, gradient in narrow):
        optimizer.step()
        return
    for master, _ in narrow:
        master.grad = None
    while narrow:
        some, narrow = narrow[:WIDENED_AT_ONCE], narrow[WIDENED_AT_ONCE:]
        for master, gradient in some:
            master.grad_dtype = master.dtype
            master.grad = gradient.to(master.dtype)
        optimizer.step()
        for master, gradient in some:
            master.grad = None
            master.grad_dtype = gradient.dtype


def move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to a master's, in the master's grad_dtype, and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if master.grad is None:
            master.grad = gradient.to(master.grad_dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return hook
