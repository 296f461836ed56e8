"""Loader workers, works of process groups, events of the profiler. torch 2.11 to 2.15."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future


def raise_if_a_worker_failed() -> None:
    """Raise torch's error where a data worker of this process has died."""
    from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails  # type: ignore[attr-defined]

    _error_if_any_worker_fails()


def finished_work(result: Any) -> Any:
    """A completed collective's handle with a result."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def give_gloo_one_thread() -> None:
    """Run the collectives of every gloo group created from now on in one thread, in the order of their calls.

    Torch starts two, and both write the name of the collective they completed to one std::string without a lock. Names
    of 16 letters or more (ALLREDUCE_COALESCED) are on the heap: two threads that replace one at the same time both free
    the same memory, and the process dies later, of SIGSEGV in malloc.
    """
    gloo: Any = dist.ProcessGroupGloo
    initialise = gloo.__init__
    if initialise.__name__ == "initialise_with_one_thread":
        return

    def initialise_with_one_thread(
        self: Any, store: Any, rank: int, size: int, options: Any = None, timeout: timedelta | None = None, **more: Any
    ) -> None:
        if not isinstance(options, gloo._Options):
            timeout, options = options or timeout, gloo._Options()
            options._timeout = timeout or c10d.default_pg_timeout
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices = [gloo.create_device(interface=name) for name in interfaces]
            options._devices = devices or [gloo.create_default_device()]
        for name, value in more.items():  # enable_reconfigure, since torch 2.15
            setattr(options, name, value)
        options._threads = 1
        initialise(self, store, rank, size, options)

    gloo.__init__ = initialise_with_one_thread


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """The process group that torch itself creates for CPU tensors."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def name_gloo_ranks(size: int) -> None:
    """Tell gloo's part of the world its ranks, which torch before 2.15 does only for a process's first group of gloo.

    A later world that is split reads past the end of an empty list, and the process dies of SIGSEGV.
    """
    world: Any = c10d._get_default_group()
    for device in world._device_types:
        backend = world._get_backend(device)
        if isinstance(backend, dist.ProcessGroupGloo):
            backend.options.global_ranks_in_group = list(range(size))


def replace_group_maker(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function with which torch creates every process group from now on."""
    c10d._new_process_group_helper = around(c10d._new_process_group_helper)


def replace_object_messages(broadcast: Callable[..., None], scatter: Callable[..., None]) -> None:
    """Replace torch's two calls that send objects from one rank to others, wherever they are called from."""
    for module in (dist, c10d):
        module.broadcast_object_list = broadcast  # type: ignore[attr-defined]
        module.scatter_object_list = scatter  # type: ignore[attr-defined]


def remember_group(group: dist.ProcessGroup, backend: str, store: Any) -> None:
    """Make torch treat a group as one of a backend."""
    c10d._world.pg_map[group] = (dist.Backend(backend), store)


def name_of_group(group: dist.ProcessGroup) -> str:
    """Torch's name of a group."""
    return str(c10d._world.pg_names[group])


def supports_coalescing(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group starts several operations in one call of its library."""
    return bool(group._get_backend(device).supports_coalescing)


@contextmanager
def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Start all that is issued inside together and wait for it; torch's own way refuses messages to the same rank."""
    group._start_coalescing(device)
    try:
        yield
    except BaseException:
        with suppress(Exception):
            group._end_coalescing(device)  # or the library would add what comes next
        raise
    work: Any = group._end_coalescing(device)
    if work is not None:
        work.wait()


def premultiplied_sum(factor: float) -> Any:
    """NCCL's sum of terms that are multiplied first."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def is_cuda_event(event: Any) -> bool:
    """Whether a profiler's event ran on the GPU."""
    from torch._C._autograd import DeviceType

    return bool(event.device_type == DeviceType.CUDA)
