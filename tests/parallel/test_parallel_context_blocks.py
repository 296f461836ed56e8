"""The blocks of a shared sequence: who sees what, how much work each rank has, and that every kernel says the same."""

import random
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model.documents import Documents
from meshwright.parallel.context import blocks as context_blocks
from meshwright.parallel.context import rings as context
from meshwright.parallel.context.blocks import block_backward, block_forward, flash_spans, math_backward, math_forward
from meshwright.parallel.context.order import Block, Order, order_of, zigzag_places
from meshwright.parallel.context.rings import ring_backward, ring_forward, run_in_step

B, S, H, K, E = 2, 48, 6, 2, 8
CPU = torch.device("cpu")
Part = Generator[Tensor, Callable[[], Tensor], tuple[Tensor, ...]]


def random_documents(seed: int) -> Documents:
    draws = random.Random(seed)
    rows = []
    for _ in range(B):
        begins = sorted(draws.sample(range(1, S), draws.choice([0, 1, 2, 5, 20])))
        rows.append(torch.bucketize(torch.arange(S), torch.tensor(begins, dtype=torch.int64), right=True))
    return Documents(torch.stack(rows), at_most=B * 21)


def orders(ranks: int, documents: Documents | None = None, window: int | None = None) -> list[Order]:
    return [order_of(rank, ranks, S, documents, window, CPU) for rank in range(ranks)]


def blocks(ranks: int, documents: Documents | None = None, window: int | None = None) -> list[Block]:
    return [order.block(source) for order in orders(ranks, documents, window) for source in order.sources()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_places_are_two_chunks_in_order_and_cover_the_sequence(ranks: int) -> None:
    places = [zigzag_places(S, rank, ranks).tolist() for rank in range(ranks)]
    assert sorted(place for held in places for place in held) == list(range(S))
    assert all(held == sorted(held) and len(held) == S // ranks for held in places)
    assert places[0][0] == 0 and places[0][-1] == S - 1


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch.sequence_length = 50 .* layout.cp = 4 .* multiple of 8"):
        zigzag_places(50, 0, 4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_every_rank_has_the_same_work_and_in_plain_order_it_would_not(ranks: int) -> None:
    """Query-key pairs in the blocks that kernels are given; every pair of the causal triangle is in exactly one."""
    pairs = []
    for order in orders(ranks):
        given = [order.block(source) for source in order.sources()]
        pairs.append(sum(int(block.visible(slice(None)).sum()) for block in given))
        unseen = [int((~block.visible(slice(None))).sum()) for block in given if not block.diagonal]
        assert sum(unseen) == 0  # no kernel works on a pair that the triangle leaves out
    assert len(set(pairs)) == 1
    assert sum(pairs) == S * (S + 1) // 2
    length = S // ranks
    plain = [sum(place + 1 for place in range(rank * length, (rank + 1) * length)) for rank in range(ranks)]
    assert max(plain) / min(plain) > ranks


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_all_ranks_are_the_mask_of_the_whole(seed: int, window: int | None) -> None:
    documents = random_documents(seed)
    seen = torch.zeros(B, S, S, dtype=torch.int64)
    for block in blocks(4, documents, window):
        seen[:, block.places_Q[:, None], block.places_T] += block.visible(slice(None)).expand(B, -1, -1).long()
    row, column = torch.arange(S)[:, None], torch.arange(S)
    expected = (column <= row) & (column > row - (window or S))
    assert torch.equal(seen, (expected & (documents.ids_BS[:, :, None] == documents.ids_BS[:, None])).long())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_spans_for_flash_kernels_say_what_the_mask_says(seed: int, ranks: int) -> None:
    documents = random_documents(seed)
    for block in blocks(ranks, documents) + blocks(ranks):
        queries, keys = len(block.places_Q), len(block.places_T)
        spans_q, spans_t, seeing, seen = flash_spans(block, B)
        assert spans_q.dtype == spans_t.dtype == torch.int32 and len(spans_q) == len(spans_t)
        pairs = torch.zeros(B * queries, B * keys, dtype=torch.bool)
        for i in range(len(spans_q) - 1):
            pairs[spans_q[i] : spans_q[i + 1], spans_t[i] : spans_t[i + 1]] = True
        if block.diagonal:
            pairs = pairs.tril()  # as kernels do within a span, whose queries and keys are the same tokens
        expected = torch.block_diag(*block.visible(slice(None)).expand(B, -1, -1))
        assert torch.equal(pairs, expected.bool())
        everyone = torch.ones(1, dtype=torch.bool)
        assert torch.equal(expected.any(1), (everyone if seeing is None else seeing).expand(B, queries).flatten())
        assert torch.equal(expected.any(0), (everyone if seen is None else seen).expand(B, keys).flatten())


def one_block(
    block: Block, forward: Callable[..., tuple[Tensor, ...]], backward: Callable[..., tuple[Tensor, ...]]
) -> list[Tensor]:
    """Results of one block, with the log-sum-exp that more keys elsewhere would have given in the backward."""
    torch.manual_seed(3)
    q, grad, out_of_all = (torch.randn(B, len(block.places_Q), H, E, dtype=torch.float64) for _ in range(3))
    k, v = (torch.randn(B, len(block.places_T), K, E, dtype=torch.float64) for _ in range(2))
    out, lse = forward(q, k, v, block)
    of_all = torch.where(lse.isinf(), 0.0, lse) + 0.5
    return [out, lse, *backward(grad, q, k, v, out_of_all, of_all, block)]


@pytest.mark.parametrize("piece", [2**22, 100])
def test_formulas_equal_the_cpu_kernel_in_every_block(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_blocks, "SLICE_ELEMENTS", piece)
    for documents, window in ((None, None), (random_documents(2), None), (None, 11), (random_documents(2), 11)):
        for block in blocks(2, documents, window):
            ours = one_block(block, math_forward, math_backward)
            for a, b in zip(ours, one_block(block, block_forward, block_backward), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_queries_that_see_nothing_give_zero_and_minus_infinity() -> None:
    documents = Documents((torch.arange(S) // 6).expand(B, S))  # every chunk of four ranks is a document of its own
    apart = [block for block in blocks(4, documents) if not block.diagonal]
    assert len(apart) == 12
    for block in apart:
        for forward, backward in ((block_forward, block_backward), (math_forward, math_backward)):
            out, lse, *grads = one_block(block, forward, backward)
            assert torch.all(out == 0) and torch.all(lse == float("-inf"))
            assert all(torch.all(grad == 0) for grad in grads)


def counted(part: Part, sent: list[int]) -> Part:
    """The same part of a ring; the bytes of each message it sends are noted."""
    message = next(part)
    while True:
        sent.append(message.numel() * message.element_size())
        arrival = yield message
        try:
            message = part.send(arrival)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_a_ring_sends(ranks: int, dtype: torch.dtype) -> None:
    """Forward sends k and v of S / c tokens c - 1 times; backward again, with gradients in float32 or wider."""
    q = torch.randn(B, S // ranks, H, E).to(dtype)
    kv = torch.randn(2, B, S // ranks, K, E).to(dtype)
    once, wider = kv.numel() * kv.element_size(), kv.numel() * max(kv.element_size(), 4)
    sent: list[list[int]] = [[] for _ in range(ranks)]
    forward = run_in_step([counted(ring_forward(q, kv, order), sent[order.rank]) for order in orders(ranks)])
    assert sent == [[once] * (ranks - 1)] * ranks
    sent = [[] for _ in range(ranks)]
    ended = zip(forward, orders(ranks), strict=True)
    backwards = [ring_backward(q, q, kv, out, lse, order) for (out, lse), order in ended]
    run_in_step([counted(part, sent[order.rank]) for part, order in zip(backwards, orders(ranks), strict=True)])
    assert [sum(messages) for messages in sent] == [(ranks - 1) * (once + wider)] * ranks


def test_keys_travel_while_a_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    def computed(*given: Any) -> Any:
        events.append("compute")
        return block_forward(*given)

    def awaited() -> Tensor:
        events.append("await")
        return kv

    monkeypatch.setattr(context, "block_forward", computed)
    q, kv = torch.randn(B, S // 3, H, E), torch.randn(2, B, S // 3, K, E)
    part = ring_forward(q, kv, orders(3)[1])
    next(part)
    with pytest.raises(StopIteration):
        while True:
            events.append("send")
            part.send(awaited)
    assert events == ["send", "compute", "await", "send", "compute", "await", "compute"]
