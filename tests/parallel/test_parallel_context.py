"""Attention over a shared sequence against CausalAttend over the whole of it: results, log-sum-exp and gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model.attend import CausalAttend
from meshwright.model.documents import Documents
from meshwright.parallel.context import rings as context
from meshwright.parallel.context.attention import make_context_attend
from meshwright.parallel.context.order import zigzag_places
from meshwright.verify.ranks import run_ranks

B, S, E = 2, 48, 8
METHODS = ["ring", "allgather", "ulysses"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": True},
    "window": {"window": 11},
    "groups": {"groups": 3},
    "documents, window and groups": {"documents": True, "window": 11, "groups": 3},
    "one key-value head": {"kv_heads": 1, "groups": 8},
    "key-value heads that ranks do not divide": {"kv_heads": 3, "groups": 4},
}
LENGTHS = ([1, 30, 2, 13, 2], [5, 7, 6, 30])
"""Documents of each row: chunks are 12 or 6 tokens long, so that some cross several and some begin with one."""


def inputs(heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(B, S, count, E) for count in (heads * groups, heads, heads, heads * groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def packed() -> Documents:
    ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    return Documents(torch.stack(ids), at_most=9).bounded()


def difference(method: str, case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Largest differences on this rank, of two calls in one graph, from the whole sequence on one device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    window, documents = case.get("window"), packed() if case.get("documents") else None
    q, k, v, grad = inputs(case.get("kv_heads", ranks), case.get("groups", 1), dtype)
    places = zigzag_places(S, rank, ranks)

    def twice(attend: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        once, _ = attend(*leaves, None, documents)
        out, lse = attend(once, leaves[1], leaves[2], None, documents)
        out.backward(grad)
        return [out.detach(), lse, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def wide(tensors: list[Tensor]) -> list[Tensor]:
        return [t.double() for t in tensors]

    one = wide(twice(CausalAttend(window), *wide([q, k, v, grad])))
    expected = [t[:, :, places] if i == 1 else t[:, places] for i, t in enumerate(one)]
    attend = make_context_attend(method, dist.group.WORLD, window)
    found = wide(twice(attend, *(t[:, places] for t in (q, k, v, grad))))
    with torch.no_grad():
        evaluated, _ = attend(q[:, places], k[:, places], v[:, places], None, documents)
    wide_q, wide_k, wide_v = wide([q, k, v])
    found, expected = (
        [*found, evaluated.double()],
        [*expected, CausalAttend(window)(wide_q, wide_k, wide_v, None, documents)[0][:, places]],
    )
    names = ["out", "lse", "q", "k", "v", "without gradients"]
    return {name: (a - b).abs().max().item() for name, a, b in zip(names, found, expected, strict=True)}


def differences(method: str) -> dict[str, dict[str, float]]:
    return {name: difference(method, case) for name, case in CASES.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_as_on_one_device(method: str, ranks: int) -> None:
    for found in run_ranks(differences, ranks, method):
        for case, values in found.items():
            assert max(values.values()) <= 1e-12, (case, values)


@pytest.mark.parametrize("method", METHODS)
def test_through_the_host_as_ranks_that_share_a_gpu(method: str) -> None:
    """That group finishes a send before it begins to receive."""
    for found in run_ranks(difference, 4, method, CASES["documents"], backend="staged", timeout_s=30.0):
        assert max(found.values()) <= 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_narrow_formats_stay_close(method: str) -> None:
    case = CASES["documents, window and groups"]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        for found in run_ranks(difference, 2, method, case, dtype):
            assert max(found.values()) <= tolerance, (dtype, found)


def test_a_merge_without_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
        out.add_(block_out).mul_(0.5)
        lse.copy_(torch.logaddexp(lse, block_lse))

    monkeypatch.setattr(context, "merge", unweighted)
    assert min(found["out"] for found in run_ranks(difference, 2, "ring", {})) > 1e-2


def test_a_ring_that_does_not_turn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent_to_oneself(outgoing: Tensor, group: dist.ProcessGroup) -> Any:
        return lambda: outgoing

    monkeypatch.setattr(context, "_pass_on", sent_to_oneself)
    assert min(found["k"] for found in run_ranks(difference, 2, "ring", {})) > 1e-2


def group_differences(method: str) -> float:
    """Two groups of two ranks, side by side, each over the same sequence."""
    world = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[world // 2]
    places = zigzag_places(S, world % 2, 2)
    q, k, v, _ = (t + world // 2 for t in inputs(2, 1))
    out, _ = make_context_attend(method, group, None)(q[:, places], k[:, places], v[:, places], None, packed())
    expected = CausalAttend()(q, k, v, None, packed())[0][:, places]
    return (out - expected).abs().max().item()


@pytest.mark.parametrize("method", METHODS)
def test_within_a_group_of_the_ranks(method: str) -> None:
    assert max(run_ranks(group_differences, 4, method)) <= 1e-12


def saved_bytes(method: str) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = zigzag_places(S, rank, ranks)
    q, k, v = (t[:, places].requires_grad_() for t in inputs(2, 3)[:3])
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make_context_attend(method, dist.group.WORLD, None)(q, k, v, None, packed())
    return sum(saved.values())


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_only_the_ranks_own_tensors_wait_for_the_backward(method: str) -> None:
    length, heads, kv_heads = S // 2, 6, 2
    own = 8 * B * length * (2 * heads * E + 2 * kv_heads * E + heads)  # q and out, k and v, log-sum-exp
    documents = 8 * B * S  # their numbers, which all layers share
    assert run_ranks(saved_bytes, 2, method) == [own + documents, own + documents]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UserError, match=r'layout.cp_method = "rings" is not one of ring, allgather, ulysses'):
        make_context_attend("rings", None, None)
