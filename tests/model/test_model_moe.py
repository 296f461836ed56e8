"""Mixtures of experts on one device, against the same written token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from meshwright.job import Model
from meshwright.model import Decoder, initialise, routers
from meshwright.model.moe import (
    MixtureOfExperts,
    fit_one_kernel,
    of_experts_with_rows,
    products_one_by_one,
    products_together,
)

EXPERTS: dict[str, Any] = {"count": 6, "top_k": 2, "ffn_width": 5}
SIGMOID = EXPERTS | {"scores": "sigmoid", "groups": 3, "groups_kept": 2, "scale": 2.5}
SINGLE = SIGMOID | {"groups": 6, "groups_kept": 3}


def mixture(**changes: Any) -> MixtureOfExperts:
    shape = Model(vocab_size=32, width=8, layers=1, heads=2, experts=EXPERTS | changes)
    model = Decoder(shape).double()
    initialise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
    moe = model.layers["0"].moe
    assert isinstance(moe, MixtureOfExperts)
    return moe


def plain(moe: MixtureOfExperts, x_BSD: Tensor) -> Tensor:
    """One token and one expert at a time."""
    experts = moe.router.experts
    gate_up = moe.experts.gate_up.weight.view(experts.count, 2 * experts.ffn_width, -1)
    down = moe.experts.down.weight.view(experts.count, -1, experts.ffn_width)
    out = []
    for x in x_BSD.flatten(0, 1):
        logits = moe.router.linear.weight @ x
        scores = logits.softmax(0) if experts.scores == "softmax" else logits.sigmoid()
        wanted = (scores + moe.router.preference).detach()
        if experts.groups_kept < experts.groups:
            best = [sum(sorted(group.tolist())[-2:]) for group in wanted.view(experts.groups, -1)]
            kept = sorted(range(experts.groups), key=lambda g: -best[g])[: experts.groups_kept]
            size = experts.count // experts.groups
            wanted = torch.tensor([v if e // size in kept else -1e9 for e, v in enumerate(wanted.tolist())])
        chosen = sorted(range(experts.count), key=lambda e: -float(wanted[e]))[: experts.top_k]
        total = sum((scores[e] for e in chosen), torch.zeros(())) if experts.normalised else 1.0
        result = torch.zeros_like(x)
        for e in chosen:
            gate, up = (gate_up[e] @ x).chunk(2)
            result = result + experts.scale * scores[e] / total * (down[e] @ (F.silu(gate) * up))
        out.append(result)
    return torch.stack(out).view_as(x_BSD)


@pytest.mark.parametrize(
    "changes",
    [{}, {"normalised": False}, SIGMOID, SINGLE],
    ids=["softmax", "as scored", "sigmoid", "groups of a single expert"],
)
def test_it_equals_one_token_at_a_time(changes: dict[str, Any]) -> None:
    moe = mixture(**changes)
    moe.router.preference.copy_(torch.linspace(-0.3, 0.3, 6))
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    weights = [x, *moe.parameters()]
    ours, theirs = moe(x), plain(moe, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(ours)
    for own, other in zip(
        torch.autograd.grad(ours, weights, seed), torch.autograd.grad(theirs, weights, seed), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_gradients_of_its_losses_are_those_of_their_formulas(scores: str) -> None:
    moe = mixture(scores=scores, balance_loss=0.3, z_loss=0.2)
    moe.router.loss_share = 0.25
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    (0.0 * moe(x)).sum().backward()

    weight = moe.router.linear.weight.detach().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in x:
        logits = sequence @ weight.T
        shares = logits.softmax(-1) if scores == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, True)
        chosen = logits.topk(2, -1).indices
        often = torch.stack([(chosen == e).sum() / (2 * 5) * 6 for e in range(6)])
        loss = loss + 0.3 * (often * shares.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    (0.25 * loss).backward()
    torch.testing.assert_close(moe.router.linear.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)


def test_products_in_one_kernel_are_those_of_one_expert_at_a_time() -> None:
    """In bf16, where both round alike on a CPU; an expert without rows among them."""
    rows = torch.randn(48, 16).bfloat16().requires_grad_()
    weights = torch.randn(3, 24, 16).bfloat16().requires_grad_()
    counts = torch.tensor([16, 0, 32])
    together = products_together(rows, weights, counts)
    single = products_one_by_one(rows, weights, counts)
    torch.testing.assert_close(together, single)
    seed = torch.randn_like(single)
    theirs = torch.autograd.grad(single, (rows, weights), seed)
    for own, other in zip(torch.autograd.grad(together, (rows, weights), seed), theirs, strict=True):
        torch.testing.assert_close(own, other)


def test_what_one_kernel_does_not_take_is_multiplied_one_by_one() -> None:
    sizes = [(64, 48, 16), (1024, 8, 8), (4, 20, 16), (4, 24, 12)]
    assert [fit_one_kernel(torch.empty(size)) for size in sizes] == [True, False, False, False]


def test_gradients_that_a_kernel_did_not_write_are_zero() -> None:
    written = torch.full((4, 2, 2), 3.0)
    found = of_experts_with_rows(written.index_fill(0, torch.tensor([0, 2]), float("nan")), torch.tensor([0, 5, 5, 6]))
    assert found[:, 0, 0].tolist() == [0.0, 3.0, 0.0, 3.0]


def test_of_equal_experts_the_first_are_chosen() -> None:
    moe = mixture()
    with torch.no_grad():
        moe.router.linear.weight.zero_()
    assert moe.router(torch.randn(1, 4, 8, dtype=torch.float64)).chosen_BSK.tolist() == [[[0, 1]] * 4]


def test_a_preference_changes_the_choice_and_not_the_weights() -> None:
    moe = mixture(normalised=False)
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    moe.router.preference[4] = 2.0
    routing = moe.router(x)
    assert (routing.chosen_BSK[..., 0] == 4).all()
    scores = (x @ moe.router.linear.weight.T).softmax(-1)
    torch.testing.assert_close(routing.weights_BSK, scores.gather(-1, routing.chosen_BSK))


def test_forced_balance_gives_every_expert_as_many_tokens() -> None:
    moe = mixture(force_balance=True)
    moe(torch.randn(2, 9, 8, dtype=torch.float64))
    assert moe.router.load.tolist() == [6] * 6


def test_tokens_are_counted_in_training_only() -> None:
    shape = Model(vocab_size=32, width=8, layers=3, heads=2, experts=EXPERTS | {"first_dense": 1})
    model = Decoder(shape)
    initialise(model, 0)
    tokens = torch.randint(0, 32, (2, 8))
    with torch.no_grad():
        model(tokens)
    model(tokens, labels=tokens, valid_count=16).backward()
    assert [layer for layer, _ in routers(model)] == [1, 2]
    assert [int(router.load.sum()) for _, router in routers(model)] == [32, 32]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"top_k": 7}, "model.experts.top_k = 7 is more than model.experts.count = 6; lower it"),
        ({"groups": 4}, "model.experts.groups = 4 does not divide model.experts.count = 6"),
        ({"groups_kept": 2}, "model.experts.groups_kept = 2 is more than model.experts.groups = 1"),
        ({"groups": 6, "top_k": 2}, "model.experts.top_k = 2 is more than the 1 experts of groups_kept = 1 groups"),
        ({"first_dense": 2}, "model.experts.first_dense = 2 leaves none of model.layers = 2 with experts"),
    ],
)
def test_experts_that_cannot_be_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Model(layers=2, experts=EXPERTS | changes)
    assert sentence in caught.value.errors()[0]["msg"]
