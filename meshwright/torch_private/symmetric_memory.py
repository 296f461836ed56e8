"""Products that run in pieces beside their messages, and the compiler's pass that writes them. Heavy to import. torch
2.11 to 2.15."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory as symmetric

_MESSAGES = torch.ops._c10d_functional
GATHER, SCATTER = _MESSAGES.all_gather_into_tensor.default, _MESSAGES.reduce_scatter_tensor.default
WAIT = _MESSAGES.wait_tensor.default
"""The messages of a compiled graph."""
GATHERED_PRODUCT, SCATTERED_PRODUCT = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
"""Torch's names of the two operations."""
Ran = Callable[[str], None]

_kernels: list[Any] = []
_plain = ExitStack()
"""As long as this is open, the operations are computed plainly on a GPU, too."""


def use_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let a group's ranks read and write each other's memory; torch 2.13 warns that a later one needs no such call."""
    enable = getattr(symmetric, "enable_symm_mem_for_group", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if enable is not None:
            enable(group.group_name)


def use_plain(group: dist.ProcessGroup, ran: Ran) -> None:
    """Compute a group's fused operations as torch's own tests do: the message, then the product. `ran` is called with
    the name of each that runs on a CPU, for which torch has no kernels at all."""
    _plain.close()
    _plain.enter_context(symmetric._test_mode({group.group_name}))

    def told(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            ran(name)
            return compute(*given, **named)

        return run

    _kernels.clear()  # a library takes its kernels with it
    library: Any = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(GATHERED_PRODUCT, told(GATHERED_PRODUCT, symmetric._fused_all_gather_matmul_fallback), "CPU")
    library.impl(SCATTERED_PRODUCT, told(SCATTERED_PRODUCT, symmetric._fused_matmul_reduce_scatter_fallback), "CPU")
    _kernels.append(library)


def fuse_messages(graph: torch.fx.Graph) -> None:
    """Torch's pass: products of what was gathered, and sums of products that are scattered, become one operation each,
    in groups that were named to one of the functions above."""
    with _nccl_assumed():
        micro_pipeline_tp_pass(graph)


@contextmanager
def _nccl_assumed() -> Iterator[None]:
    """The pass does nothing in a torch that is built without NCCL, as those for CPUs are."""
    real = dist.is_nccl_available
    dist.is_nccl_available = lambda: True
    try:
        yield
    finally:
        dist.is_nccl_available = real
