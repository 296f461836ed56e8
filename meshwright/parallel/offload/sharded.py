"""Offload where the model is sharded: torch keeps each rank's shards of the masters in host memory, and with them their
gradients and the optimizer's states; a unit's working copy is derived from them whenever it is gathered.

Torch does the copies; here they are only requested and counted.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from meshwright.job import Job
from meshwright.parallel.offload.host import TRAFFIC
from meshwright.parallel.offload.weights import offloads
from meshwright.torch_private.sharding import is_gathering, parameter_groups, shard_bytes


def offload_policy(job: Job, device: torch.device) -> OffloadPolicy:
    """Where `fully_shard` keeps the shards; page-locked memory helps only a GPU."""
    if offloads(job, "optimizer", "params"):
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return OffloadPolicy()


def materialise_on_host(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for a sharded model on the meta device: shards on the host, anything else where it is computed
    with."""
    model.to_empty(device=torch.device("cpu"))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def count_traffic(model: nn.Module) -> None:
    """Count every gather from host memory and every gradient copied there."""
    counter = _Counter()
    with counter.safely():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    counter.follow(group)


class _Counter:
    """Counts while torch's groups are as expected: an error in counting is reported once and never fails a run."""

    def __init__(self) -> None:
        self._counting = True

    @contextmanager
    def safely(self) -> Iterator[None]:
        """Wraps code that may fail."""
        try:
            yield
        except Exception as error:
            if self._counting:
                self._counting = False
                fault = f"{type(error).__name__}: {error}"
                warnings.warn(f"bytes to and from the host are no longer counted ({fault})", stacklevel=2)

    def follow(self, group: Any) -> None:
        """Count what a group gathers and what it reduces."""
        unshard, post_backward = group.unshard, group.post_backward

        def counting_unshard(async_op: bool = False) -> None:
            idle = self._counting and self._is(group, gathering=False)
            unshard(async_op)
            if idle and self._is(group, gathering=True):
                with self.safely():
                    TRAFFIC.to_device_bytes += sum(shard_bytes(each) for each in group.fsdp_params)

        def counting_post_backward(*unused: Any) -> None:
            with self.safely():
                if self._counting and group.reduce_grads:
                    made = [each for each in group.fsdp_params if _has_gradient(each)]
                    TRAFFIC.to_host_bytes += sum(shard_bytes(each) for each in made)
            post_backward(*unused)

        group.unshard, group.post_backward = counting_unshard, counting_post_backward

    def _is(self, group: Any, *, gathering: bool) -> bool:
        with self.safely():
            return is_gathering(group) == gathering
        return False


def _has_gradient(parameter: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None
