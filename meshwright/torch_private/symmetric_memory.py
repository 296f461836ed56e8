"""Products that run in pieces beside their messages, and the compiler's pass that writes them. Heavy to import. torch
2.11 to 2.15."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory as symmetric

GATHERED_PRODUCT, SCATTERED_PRODUCT = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
"""Torch's names of the two operations."""
Ran = Callable[[str], None]

_kernels: list[torch.library.Library] = []
_plain = ExitStack()
"""As long as this is open, the operations are computed plainly on a GPU, too."""


def use_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let a group's ranks read and write each other's memory; torch 2.13 warns that a later one needs no call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric.enable_symm_mem_for_group(group.group_name)


def use_plain(group: dist.ProcessGroup, ran: Ran) -> None:
    """Compute a group's fused operations as torch's own tests do: the message, then the product. `ran` is told the name
    of each that runs on a CPU, for which torch has no kernels at all."""
    _plain.close()
    _plain.enter_context(symmetric._test_mode({group.group_name}))

    def gathered(shard: Tensor, others: list[Tensor], dim: int, name: str, *, return_A: bool = True) -> object:
        ran(GATHERED_PRODUCT)
        return symmetric._fused_all_gather_matmul_fallback(shard, others, dim, name, return_A=return_A)

    def scattered(first: Tensor, second: Tensor, operation: str, dim: int, name: str) -> Tensor:
        ran(SCATTERED_PRODUCT)
        return symmetric._fused_matmul_reduce_scatter_fallback(first, second, operation, dim, name)

    _kernels.clear()  # a library takes its kernels with it
    library = torch.library.Library("symm_mem", "IMPL")  # noqa: TOR901
    library.impl(GATHERED_PRODUCT, gathered, "CPU")
    library.impl(SCATTERED_PRODUCT, scattered, "CPU")
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
