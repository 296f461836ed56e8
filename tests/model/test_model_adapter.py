"""Adapters next to frozen weights: what they compute, and what they cost, counted."""

from itertools import product
from typing import Any

import pytest
import torch
from test_model_cost import NOT_COUNTED, SMALL, VARIANTS, B, S, counted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import Mode, decoder_cost, flops_per_token, needs_last, parameter_count, trained_parameters
from meshwright.job.model import Model
from meshwright.model import Decoder, Draws, initialise
from meshwright.model.adapter import AdaptedLinear, is_adapter, merged
from meshwright.model.attention import Attention
from meshwright.model.dropout import AFTER_ATTENTION, AFTER_EMBEDDING, AFTER_FEEDFORWARD
from meshwright.model.feedforward import FeedForward
from meshwright.parallel.recompute import apply_recompute

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"targets": ("q", "o", "ffn.down")},
    "dropout": {"dropout": 0.1},
    "dora": {"dora": True, "rslora": True},
    "dora, dropout, few": {"dora": True, "dropout": 0.1, "targets": ("attention",)},
}
SHAPES = ("llama", "grouped", "gpt2", "latent", "latent, queries at once")


def shaped(variant: str, adapter: str, **changes: Any) -> Model:
    rank = {"adapter": {"rank": 3, "alpha": 6.0} | ADAPTERS[adapter]}
    return Model(**SMALL | VARIANTS[variant] | rank | changes)


def frozen(shape: Model) -> Decoder:
    model = Decoder(shape)
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model


@pytest.mark.parametrize(
    ("variant", "adapter"),
    # Of the first latent block at most as much is kept as stated if not all projections of its input have adapters.
    [pair for pair in product(SHAPES, ADAPTERS) if "latent" not in pair[0] or pair[1] != "some"],
)
def test_stated_costs_equal_counted_ones(variant: str, adapter: str) -> None:
    shape = shaped(variant, adapter)
    model = frozen(shape)
    tokens, labels = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, S))
    draws = Draws(0, 0, torch.arange(B))
    stated = decoder_cost(shape, B, S, 4)
    held = counted(lambda: model(tokens, labels, B * S, draws=draws), model.parameters())
    assert held == stated.saved_total, stated.saved_bytes
    assert stated.parameters == parameter_count(shape) == sum(p.numel() for p in model.parameters())
    assert trained_parameters(shape) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as forward:
        loss = model(tokens, labels, B * S, draws=draws)
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as backward:
        loss.backward()
    assert forward.get_total_flops() == stated.forward_flops
    assert backward.get_total_flops() == stated.backward_flops


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("adapter", ["all", "dora", "some"])
def test_recomputation_repeats_what_is_stated(adapter: str, mode: Mode) -> None:
    shape = shaped("llama", adapter)
    model = frozen(shape)
    apply_recompute(model, dict.fromkeys(range(shape.layers), mode), keep_last=needs_last(shape))
    tokens, labels = torch.randint(0, 29, (B, S)), torch.randint(0, 29, (B, S))
    loss = model(tokens, labels, B * S)
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as backward:
        loss.backward()
    stated = decoder_cost(shape, B, S, 4, dict.fromkeys(range(shape.layers), mode))
    assert backward.get_total_flops() == stated.backward_flops


def test_flops_per_token_leave_out_the_gradients_of_frozen_weights() -> None:
    shape = shaped("llama", "all")
    whole, own = flops_per_token(shape.base, S, "full"), parameter_count(shape) - parameter_count(shape.base)
    matrices = 2 * (4 * 24 * 24 + 3 * 24 * 20) + 29 * 24
    assert flops_per_token(shape, S, "full") == whole - 2 * matrices + 6 * own


@pytest.mark.parametrize("adapter", ["all", "dora"])
def test_a_merged_weight_computes_what_the_adapter_computes(adapter: str) -> None:
    model = frozen(shaped("llama", adapter)).double()
    linear = model.get_submodule("layers.0.attention.q")
    assert isinstance(linear, AdaptedLinear)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(linear(x), x @ linear.weight.T, rtol=1e-6)  # B is zero
        linear.lora_b.normal_()
        whole = merged(linear.weight, linear.lora_a, linear.lora_b, linear.lora_magnitude, linear.scale)
        assert torch.allclose(linear(x), x @ whole.T, rtol=1e-9)
        assert not torch.allclose(linear(x), x @ linear.weight.T, rtol=1e-2)


def fuse(model: Decoder) -> None:
    """As in compiled blocks."""
    for module in model.modules():
        if isinstance(module, Attention | FeedForward | AdaptedLinear):
            module.fused = True


@pytest.mark.parametrize("adapter", ["all", "some", "dropout"])
@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_products_added_as_they_are_made_are_those_of_separate_ones(variant: str, adapter: str) -> None:
    """And no copy of weights that have no gradient is kept."""
    shape = shaped(variant, adapter, ffn_width=200, qkv_bias=True)
    tokens, results, largest = torch.randint(0, 29, (B, S)), [], []
    for fused in (False, True):
        model = frozen(shape).double()
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.constant_(parameter, 0.01)
        if fused:
            fuse(model)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens, tokens, B * S, draws=Draws(0, 0, torch.arange(B)))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        largest.append(max(size for place, size in sizes.items() if place not in own))
    assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(*results, strict=True))
    assert largest[1] < 8 * 24 * 2 * 200  # less than gate and up


class Calls(TorchDispatchMode):
    """The gradients that are computed: of each product's inputs and weights, how many."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "adapted_backward" in str(function):
            *_, weights, ups, _ = args
            self.seen.append((len(weights), len(ups)))
        return function(*args, **(kwargs or {}))


def test_nothing_is_computed_for_what_is_not_trained() -> None:
    """Each product's backward gets the weights for its input's gradient; that of the first block's input gets none."""
    shape = shaped("llama", "all")
    model = frozen(shape)
    fuse(model)
    tokens = torch.randint(0, 29, (B, S))
    loss = model(tokens, tokens, B * S)
    with Calls() as calls:
        loss.backward()
    assert calls.seen == [(1, 1), (2, 2), (1, 1), (3, 3)] * (shape.layers - 1) + [(1, 1), (2, 2), (1, 1), (0, 3)]
    assert all((parameter.grad is not None) == is_adapter(name) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("variant", ["llama", "latent"])
def test_no_two_dropouts_of_a_layer_share_a_mask(variant: str) -> None:
    """Masks depend on a site's number: those of adapters differ from each other and from the model's own."""
    model = Decoder(shaped(variant, "dropout"))
    sites = [module.site for module in model.layers["0"].modules() if isinstance(module, AdaptedLinear)]
    everyone = [*sites, AFTER_EMBEDDING, AFTER_ATTENTION, AFTER_FEEDFORWARD]
    assert len(sites) >= 7 and len(set(everyone)) == len(everyone)


def test_adapters_change_nothing_before_they_are_trained() -> None:
    adapted, plain = Decoder(shaped("llama", "dora")), Decoder(Model(**SMALL | VARIANTS["llama"]))
    for model in (adapted, plain):
        initialise(model, 0)
    tokens = torch.randint(0, 29, (B, S))
    torch.testing.assert_close(adapted(tokens), plain(tokens))
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_a"):
            assert parameter.abs().max() > 0
