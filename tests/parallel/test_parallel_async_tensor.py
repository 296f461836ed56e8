"""Asynchronous tensor parallelism: graphs are rewritten for torch's pass, compute the same, and really run fused.

The matrix has whole layouts, and its test says how many messages ran fused.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.parallel.async_graph import use_known_patterns
from meshwright.parallel.async_tensor import fused_calls
from meshwright.torch_private.symmetric_memory import GATHERED_PRODUCT, SCATTERED_PRODUCT, fuse_messages, use_plain
from meshwright.verify import load_matrix, run_ranks
from meshwright.verify.fused import check_fused

RANKS = 2
MESSAGES = torch.ops._c10d_functional


def test_a_check_without_fused_products_fails() -> None:
    job = next(line.job for line in load_matrix() if line.job.layout.async_tp)
    ran = {GATHERED_PRODUCT: 3, SCATTERED_PRODUCT: 3}
    assert check_fused(job, "cpu", [ran, ran]) == []
    [row] = check_fused(job, "cpu", [ran, {GATHERED_PRODUCT: 3}])
    assert row.ok is False and row.name == SCATTERED_PRODUCT and "says nothing about layout.async_tp" in row.note


def _gathered(x: Tensor) -> Tensor:
    """A sequence's parts from all ranks, as DTensor gathers them."""
    name = dist.distributed_c10d._get_default_group().group_name
    whole = MESSAGES.wait_tensor(MESSAGES.all_gather_into_tensor(x, RANKS, name))
    return torch.cat(whole.split(x.shape[0]), 1) if x.shape[0] > 1 else whole.view(1, -1, x.shape[2])


def _scattered(x: Tensor) -> Tensor:
    name = dist.distributed_c10d._get_default_group().group_name
    parts = torch.cat(x.split(x.shape[1] // RANKS, 1))
    return MESSAGES.wait_tensor(MESSAGES.reduce_scatter_tensor(parts, "sum", RANKS, name))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return product.view(*x.shape[:-1], -1)


def _projected(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Three projections of what is gathered, one with a bias, and the sum of three products that is scattered."""
    whole = _gathered(x)
    up, gate = _product(whole, weights[0]), _product(whole, weights[1], weights[2])
    back = _product(up, weights[3]) + _product(gate, weights[4]) + _product(up * gate, weights[5])
    return up, gate, _scattered(back)


def _rewrite(batch: int) -> tuple[dict[str, int], float]:
    """The operations that a rank's rewritten graph has and ran, and how far its results are off."""
    torch.manual_seed(dist.get_rank())
    group = dist.distributed_c10d._get_default_group()
    use_plain(group, lambda name: fused_calls.update([name]))
    x = torch.randn(batch, 3, 4, dtype=torch.float64)
    shapes = [(4, 6), (4, 6), (6,), (6, 4), (6, 4), (6, 4)]
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = _projected(x, weights)
    traced = make_fx(_projected, tracing_mode="fake")(x, weights)
    view_to_reshape(traced)
    use_known_patterns(traced.graph)
    fuse_messages(traced.graph)
    traced.recompile()
    found = traced(x, weights)
    left = [node for node in traced.graph.nodes if str(node.target).startswith("_c10d_functional")]
    off = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    return {**fused_calls, "left": len(left)}, off


@pytest.mark.parametrize("batch", [1, 2])
def test_gathers_sums_and_biases_are_rewritten_and_compute_the_same(batch: int) -> None:
    for ran, off in run_ranks(_rewrite, RANKS, batch):
        assert ran == {GATHERED_PRODUCT: 1, SCATTERED_PRODUCT: 1, "left": 0}
        assert off < 1e-12


def test_the_refusals_say_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of two nodes, and GPUs of one that do not reach each other."""
    from meshwright.parallel import async_tensor

    def refused(places: list[tuple[str, int]]) -> str:
        def gather(found: list[Any], own: Any, group: Any) -> None:
            found[:] = places

        monkeypatch.setattr(async_tensor.dist, "all_gather_object", gather)
        with pytest.raises(async_tensor.UserError) as caught:
            async_tensor._require_shared_memory(_Group(len(places)))  # type: ignore[arg-type]
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: False)
    assert "layout.tp = 3 are on 2 nodes; lower layout.tp to 1" in refused([("a", 0), ("a", 1), ("b", 0)])
    assert "do not (0 and 1 here); set layout.async_tp = false" in refused([("a", 0), ("a", 1)])


class _Group:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks
