"""The memory curve: what a rank holds in memory at every block and phase of its first steps, by kind.

parameters   masters, working copies, and gathered copies while they exist
gradients    of masters and parameters, and full ones that wait for their reduction
optimizer    the optimizer's states
activations  what the step has allocated beyond these: tensors kept for backward, temporary ones, the batch, buffers of
             communication
other        what was allocated beyond these when the step began; unknown on a CPU
host         any of the first three in host memory if the device is a GPU

On a GPU the total comes from the allocator. A CPU has no such counter: there the memory of every operation's result is
tracked until it is freed, which does not work with compiled code.

The model is observed through hooks, which do not change what it computes. An error in the observation is reported once
and stops it, never the run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.model import Decoder
from meshwright.parallel import Weights, live_gradients, live_parameters
from meshwright.torch_private.autograd import (
    TorchDispatchMode,
    at_end_of_backward,
    in_backward,
    is_traceable_wrapper_subclass,
    storage_key,
    storage_of_reference,
    tree_iter,
)
from meshwright.train.optimizer import Optimizer

WATCHED_STEPS = 4
"""Enough for the first allocation, the first step with states, and two that should be alike."""
WATCHED_MICRO_BATCHES = 4
"""Steps sampled block by block; the others only at their ends."""

Record = Callable[[dict[str, Any]], None]


class MemoryCurve:
    """Samples of one rank's memory in the first steps of a run; later steps cost nothing."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: Weights,
        optimizer: Optimizer,
        device: torch.device,
        rank: int,
        record: Record,
        report: Callable[[str], None],
        *,
        compiled: bool,
        steps: int = WATCHED_STEPS,
    ) -> None:
        self._steps = steps
        self._modules, self._weights, self._optimizer = modules, weights, optimizer
        self._device, self._rank, self._record, self._report = device, rank, record, report
        self._compiled = compiled
        self._results = None if device.type == "cuda" or compiled else _Results(self._give_up)
        self._given_up = False
        self._step = 0
        """The step being observed; 0 between and after them."""
        self._started: float | None = None
        self._micro_batches: dict[nn.Module, int] = {}
        self._micro_batch = 0
        self._standing_bytes = 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Observe what runs inside if it is one of the first steps."""
        if step > self._steps or self._given_up:
            yield
            return
        with ExitStack() as watching:
            watching.callback(setattr, self, "_step", 0)
            self._step = step
            self._safely(self._watch, watching)
            self._safely(self._begin)
            yield

    def sample(self, at: str, micro_batch: int | None = None, layer: str | None = None) -> None:
        """Record current memory; does nothing after the first steps."""
        if self._step:
            self._safely(self._sample, at, micro_batch, layer)

    def _safely(self, act: Callable[..., None], *given: Any) -> None:
        try:
            act(*given)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._given_up:
            self._given_up, self._step = True, 0
            self._report(f"the memory curve ends here ({type(error).__name__}: {error}); training continues")

    def _watch(self, watching: ExitStack) -> None:
        """Hook into the model until `watching` ends; inside compiled blocks, hooks would be compiled with them."""

        def after(module: nn.Module, act: Callable[..., None]) -> None:
            # Also if the module raises: torch ends a recomputation that way, once it has all it needs.
            handle = module.register_forward_hook(
                lambda called, _given, result: self._safely(act, called, result), always_call=True
            )
            watching.callback(handle.remove)

        for module in self._modules:
            handle = module.register_forward_pre_hook(lambda called, _given: self._safely(self._model_begins, called))
            watching.callback(handle.remove)
            after(module, self._model_ends)
            blocks = cast(nn.ModuleDict, module.layers)
            if isinstance(module, Decoder):
                module.after_block = lambda layer, result: self._safely(self._block_ends, layer, None, result)
                watching.callback(setattr, module, "after_block", None)
            for layer, block in () if self._compiled else blocks.items():
                if not isinstance(module, Decoder):
                    after(block, partial(self._block_ends, layer))
                for part in block.children():
                    after(part, partial(self._part_ends, layer))
        if self._results is not None:
            watching.enter_context(self._results)

    def _model_begins(self, module: nn.Module) -> None:
        self._micro_batches[module] += 1
        self._micro_batch = self._micro_batches[module]

    def _model_ends(self, module: nn.Module, result: Any) -> None:
        number = self._micro_batches[module]
        self.sample("forward_end", number)
        # The hook runs inside the backward, which calls callbacks registered from there at its end.
        self._on_gradient(result, at_end_of_backward, lambda: self.sample("backward_end", number))

    def _block_ends(self, layer: str, _block: nn.Module | None, result: Any) -> None:
        number = self._micro_batch
        if in_backward():  # a segment's blocks run again
            self._part_ends(layer, None, result)
        elif number <= WATCHED_MICRO_BATCHES:
            self.sample("forward", number, layer)
            self._on_gradient(result, self.sample, "backward", number, layer)

    def _part_ends(self, layer: str, _part: nn.Module | None, _result: Any) -> None:
        """A block or one of its own modules, which run during backward only if it recomputes the block."""
        if in_backward() and self._micro_batch <= WATCHED_MICRO_BATCHES:
            self.sample("recompute", self._micro_batch, layer)

    def _on_gradient(self, result: Any, act: Callable[..., None], *given: Any) -> None:
        """Act when a result's gradient arrives: the backward of the module that produced it is about to begin."""
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _gradient: self._safely(act, *given))  # type: ignore[no-untyped-call]

    def _sample(self, at: str, micro_batch: int | None, layer: str | None) -> None:
        kinds, host_bytes, known = self._known()
        activations = self._beyond(sum(kinds.values()), known)
        other = None
        if self._device.type == "cuda":
            assert activations is not None
            other = min(activations, self._standing_bytes)
            activations -= other
        now = time.perf_counter()
        self._started = self._started or now
        self._record(
            {
                "step": self._step,
                "at": at,
                "micro_batch": micro_batch,
                "layer": layer,
                **{f"{kind}_bytes": size for kind, size in kinds.items()},
                "activations_bytes": activations,
                "other_bytes": other,
                "host_bytes": host_bytes,
                "elapsed_s": round(now - self._started, 6),
                "rank": self._rank,
                "how": self._how,
            }
        )

    @property
    def _how(self) -> str:
        if self._device.type == "cuda":
            return "allocator"
        return "parameters, gradients and states only" if self._results is None else "results followed"

    def _begin(self) -> None:
        kinds, _, known = self._known()
        if self._results is not None:
            self._results.leave_out_what_stands()
        elif self._device.type == "cuda":
            self._standing_bytes = self._beyond(sum(kinds.values()), known) or 0
        self._micro_batches = dict.fromkeys(self._modules, 0)
        self.sample("start")

    def _known(self) -> tuple[dict[str, int], int, set[int]]:
        """Bytes of distinct memory by kind, host memory separately, and the keys of all that memory."""
        states = (value for state in self._optimizer.state.values() for value in state.values())
        groups: dict[str, Iterable[Tensor]] = {
            "parameters": live_parameters(self._modules, self._weights),
            "gradients": live_gradients(self._modules, self._weights),
            "optimizer": (value for value in states if isinstance(value, Tensor)),
        }
        seen: set[int] = set()
        kinds, host_bytes = dict.fromkeys(groups, 0), 0
        for kind, tensors in groups.items():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage_key(storage) in seen:
                    continue
                seen.add(storage_key(storage))
                if tensor.device.type == self._device.type:
                    kinds[kind] += storage.nbytes()
                else:
                    host_bytes += storage.nbytes()
        return kinds, host_bytes, seen

    def _beyond(self, known_bytes: int, known: set[int]) -> int | None:
        """What is allocated besides the known kinds; None if there is no counter."""
        if self._device.type == "cuda":
            return max(0, torch.cuda.memory_allocated(self._device) - known_bytes)
        return None if self._results is None else self._results.bytes_but(known)


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of every operation's results without keeping it alive."""

    def __init__(self, give_up: Callable[[Exception], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give_up = give_up
        self._living: dict[int, StorageWeakRef] = {}
        self._standing: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storage of its results."""
        results = func(*args, **(kwargs or {}))
        try:
            for result in tree_iter(results):
                if isinstance(result, Tensor):
                    for plain in _plain(result):
                        self._follow(plain.untyped_storage())
        except Exception as error:
            self._give_up(error)
        return results

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage_key(storage) not in self._living:  # the reference keeps the key from being reused by another storage
            self._living[storage_key(storage)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def leave_out_what_stands(self) -> None:
        """Count only what is allocated from now on."""
        self.bytes_but(set())
        self._standing = set(self._living)

    def bytes_but(self, known: set[int]) -> int:
        """Bytes of live storages, except some."""
        total = 0
        for key, reference in list(self._living.items()):
            storage = storage_of_reference(reference)
            if storage is None:
                del self._living[key]
                self._standing.discard(key)
            elif key not in known and key not in self._standing:
                total += storage.nbytes()
        return total


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The local tensor of a distributed tensor; a plain tensor unchanged."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, Tensor):  # from torch 2.13 on, one of them is the mesh
            yield from _plain(inner)
