"""Host memory for offload: page-locked buffers of exact sizes, and a stream on which copies overlap the computation.

On a machine without a GPU the same calls are plain synchronous copies.
"""

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALL_BYTES = 2**20
MOST_UNDER_WAY_BYTES = 2**30
"""Device memory that waits for its copy to the host; beyond it the host waits, so that backward cannot run too far
ahead."""


@dataclass
class Traffic:
    """What moved between this process's device and host, and how long the loop waited for it."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    wait_s: float = 0.0
    """Host time spent waiting for copies."""
    update_s: float = 0.0
    """Host time of the optimizer's update with the copies that overlap it."""


TRAFFIC = Traffic()


def take_traffic() -> Traffic:
    """What moved since the last call; resets the count."""
    taken = replace(TRAFFIC)
    vars(TRAFFIC).update(vars(Traffic()))
    return taken


def host_buffer(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer in host memory; page-locked if a GPU copies to and from it.

    Torch's own page-locked memory comes in powers of two, which for a large model is half as much again as it needs:
    larger buffers are therefore ordinary memory that is registered with the driver.
    """
    if device.type != "cuda":
        return torch.empty(elements, dtype=dtype)
    if elements * dtype.itemsize < SMALL_BYTES:
        return torch.empty(elements, dtype=dtype, pin_memory=True)
    buffer = torch.empty(elements, dtype=dtype)
    buffer.zero_()  # pages that exist, touched by all threads at once, are locked much faster
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # a thread of its own would start on the first GPU
        error = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(error) != 0:
        slow = "copies to and from it will block the computation"
        warnings.warn(f"{buffer.nbytes} bytes of host memory cannot be page-locked ({error}); {slow}", stacklevel=2)
        return buffer
    # A later buffer may get the same addresses, and the driver refuses to lock them twice.
    unlock = weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
    unlock.atexit = False  # the driver may be shut down by then
    return buffer


class CopyStream:
    """Copies between device and host in the order they were issued, overlapping the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    @contextmanager
    def enqueued(self) -> Iterator[None]:
        """What runs inside starts once the work issued so far is done, and does not block later work."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "torch.cuda.Event | None":
        """A point on the stream that `wait` can wait for; None where copies are already done."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: "torch.cuda.Event | None") -> None:
        """Make the host wait for a point on the stream."""
        if mark is None or mark.query():  # type: ignore[no-untyped-call]
            return
        started = time.perf_counter()
        mark.synchronize()
        TRAFFIC.wait_s += time.perf_counter() - started

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor of the computation alive until what was last put on the stream has read it."""
        if (mark := self.mark()) is None:
            return
        self.settle()
        self._under_way.append((mark, tensor))
        while sum(held.nbytes for _, held in self._under_way) > MOST_UNDER_WAY_BYTES:
            self.wait(self._under_way.popleft()[0])

    def settle(self) -> None:
        """Free what has been read."""
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()

    def drain(self) -> None:
        """Make the host wait for everything that is held."""
        while self._under_way:
            self.wait(self._under_way.popleft()[0])

    def join(self) -> None:
        """Make computation issued from here on wait for all of the stream; the host continues."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def join_at(self, mark: torch.cuda.Event) -> None:
        """Make the computation wait for the stream up to a point."""
        torch.cuda.current_stream(self.device).wait_event(mark)
