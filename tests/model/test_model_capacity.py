"""Experts that take at most some tokens of a sequence, against an example worked out by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from meshwright.job import Model
from meshwright.job.experts import Experts
from meshwright.model.capacity import Slots, queues
from meshwright.model.moe import MixtureOfExperts

LOGITS = torch.tensor(
    [
        [[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [2.0, 3.0, 1.0], [2.0, 1.0, 3.0]],  # experts 0 1, 0 2, 1 0, 2 0
        [[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0]],  # experts 0 1, 1 2, 2 0, 0 1
    ],
    dtype=torch.float64,
)
TAKEN = {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 2, 1), (0, 3, 2)}  # sequence, token, expert
TAKEN |= {(1, 0, 0), (1, 0, 1), (1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 2, 0)}
"""Two for each expert of each sequence: the third and fourth tokens that choose one come too late."""


def mixture(**changes: Any) -> MixtureOfExperts:
    """Three experts with biases; the router's scores are those of the input itself."""
    experts = {"count": 3, "top_k": 2, "ffn_width": 5, "capacity": 0.75} | changes
    shape = Model(vocab_size=32, width=3, layers=1, heads=1, head_dim=4, linear_bias=True, experts=experts)
    assert shape.experts is not None
    moe = MixtureOfExperts(shape, shape.experts).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
        moe.router.linear.weight.copy_(torch.eye(3))
        assert moe.router.linear.bias is not None
        moe.router.linear.bias.zero_()
    return moe


def plain(moe: MixtureOfExperts, x_BSD: Tensor, taken: set[tuple[int, int, int]]) -> Tensor:
    """One token and one of its experts at a time; the weights are those of all that it chose."""
    (gate_up, down), outs = (moe.experts.gate_up, moe.experts.down), []
    for sequence, tokens in enumerate(x_BSD):
        for place, x in enumerate(tokens):
            scores = (moe.router.linear.weight @ x + moe.router.linear.bias).softmax(0)
            chosen = scores.topk(2).indices.tolist()
            out = torch.zeros_like(x)
            for expert in [expert for expert in chosen if (sequence, place, expert) in taken]:
                inner = gate_up.weight.view(3, 10, 3)[expert] @ x + gate_up.bias.view(3, 10)[expert]
                inner = F.silu(inner[:5]) * inner[5:]
                result = down.weight.view(3, 3, 5)[expert] @ inner + down.bias.view(3, 3)[expert]
                out = out + scores[expert] / scores[chosen].sum() * result
            outs.append(out)
    return torch.stack(outs).view_as(x_BSD)


def everything() -> set[tuple[int, int, int]]:
    return {(b, s, n) for b in range(2) for s in range(4) for n in range(3)}


@pytest.mark.parametrize(("capacity", "taken", "dropped"), [(0.75, TAKEN, 4), (1.5, everything(), 0)])
def test_later_tokens_do_without_an_expert_that_is_full(
    capacity: float, taken: set[tuple[int, int, int]], dropped: int
) -> None:
    moe, x = mixture(capacity=capacity), LOGITS.clone().requires_grad_()
    weights = [x, *moe.parameters()]
    ours, theirs = moe(x), plain(moe, x, taken)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert int(moe.router.dropped) == dropped
    assert moe.router.load.tolist() == [7, 5, 4], "those that were chosen, dropped or not"
    seed = torch.randn_like(ours)
    for own, other in zip(
        torch.autograd.grad(ours, weights, seed), torch.autograd.grad(theirs, weights, seed), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_nothing_is_dropped_outside_of_training() -> None:
    moe = mixture()
    with torch.no_grad():
        torch.testing.assert_close(moe(LOGITS), plain(moe, LOGITS, everything()), rtol=1e-12, atol=1e-12)
    assert int(moe.router.dropped) == 0


def test_a_sequence_in_slices_drops_the_same_tokens() -> None:
    """Two ranks with an early and a late run each, as context parallelism has them."""
    chosen = torch.rand(3, 16, 4, generator=torch.Generator().manual_seed(0)).topk(2).indices
    whole = queues(chosen, 4, 5)
    held = torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]])

    for places in held:
        runs = places.view(2, 4)

        def before(counts_HBN: Tensor, runs: Tensor = runs) -> Tensor:
            return torch.stack([F.one_hot(chosen[:, : run[0]], 4).sum((1, 2)) for run in runs]).to(counts_HBN.dtype)

        own = queues(chosen[:, places], 4, 5, 2, before)
        assert torch.equal(own.kept_BSK, whole.kept_BSK[:, places])
        assert int(own.place_BSK[own.kept_BSK].max()) < own.most == 5
    assert not whole.kept_BSK.all() and whole.kept_BSK.any()


def test_the_number_of_rows_does_not_depend_on_the_choice() -> None:
    """Tensors without values cannot be waited for."""
    chosen = torch.empty(2, 4, 2, dtype=torch.int64, device="meta")
    slots = Slots(chosen, queues(chosen, 3, 2), 3)
    rows = slots.rows(torch.empty(8, 5, device="meta"))
    assert rows.shape == (3 * 2 * 2, 5) and slots.counts_N.shape == (3,)
    assert slots.combined(rows, torch.empty(8, 2, device="meta")).shape == (8, 5)


@pytest.mark.parametrize(("capacity", "sequence", "most"), [(1.1, 20, 22), (1, 20, 20), (0.01, 20, 1), (1.25, 21, 27)])
def test_a_share_is_rounded_up_as_it_is_written(capacity: float, sequence: int, most: int) -> None:
    assert Experts(count=4, top_k=4, ffn_width=8, capacity=capacity).most_tokens(sequence) == most


@pytest.mark.parametrize("capacity", [0, -1.5])
def test_an_impossible_capacity_is_one_sentence(capacity: float) -> None:
    with pytest.raises(ValidationError) as caught:
        Experts(count=4, top_k=2, ffn_width=8, capacity=capacity)
    [problem] = caught.value.errors()
    assert f"model.experts.capacity = {capacity:g} is not a factor above 0" in problem["msg"]
    assert "set it to 1.25, or leave it out" in problem["msg"]
