"""Dropout masks depend on where and when alone: any cut of the batch or sequence draws the same."""

import pytest
import torch
from model_shapes import preset
from torch import Tensor, nn

from meshwright.model import Decoder, Draws, initialise
from meshwright.model.dropout import AFTER_ATTENTION, AFTER_FEEDFORWARD, dropout, keep_mask

B, S, D, RATE = 4, 32, 256, 0.2


def draws(ids: list[int] | None = None, step: int | torch.Tensor = 3, seed: int = 1) -> Draws:
    return Draws(seed, step, torch.tensor([10, 11, 12, 13] if ids is None else ids))


def mask(of: Draws, layer: int = 0, site: int = 0, sequence: int = S) -> torch.Tensor:
    return keep_mask(of.at_layer(layer), RATE, site, sequence, D)


def test_rate_and_independence_of_neighbours() -> None:
    keep = mask(draws()).float()
    assert keep.mean().item() == pytest.approx(1 - RATE, abs=0.01)
    for dim in range(3):
        other = keep.roll(1, dim)
        both = (keep * other).mean().item()
        assert both == pytest.approx((1 - RATE) ** 2, abs=0.02)
    assert keep.mean((0, 1)).sub(1 - RATE).abs().max() < 0.2
    assert keep.mean((0, 2)).sub(1 - RATE).abs().max() < 0.1


def test_parts_of_batch_and_sequence_equal_the_whole() -> None:
    whole = mask(draws())
    assert torch.equal(mask(draws([12, 13])), whole[2:])
    places = torch.arange(S)[[1, 5, 30]]
    part = Draws(1, 3, torch.tensor([10, 11, 12, 13]), places)
    assert torch.equal(mask(part, sequence=3), whole[:, places])
    per_row = Draws(1, 3, torch.tensor([10, 11, 12, 13]), places.expand(B, 3))
    assert torch.equal(mask(per_row, sequence=3), whole[:, places])


def test_every_key_changes_the_mask_and_a_step_may_be_a_tensor() -> None:
    whole = mask(draws())
    assert torch.equal(mask(draws(step=torch.tensor(3))), whole)
    changed = {
        "step": mask(draws(step=4)),
        "seed": mask(draws(seed=2)),
        "high bits of the seed": mask(draws(seed=1 + 2**32)),
        "layer": mask(draws(), layer=1),
        "site": mask(draws(), site=1),
        "sample": mask(draws([20, 21, 22, 23])),
        "high bits of the sample": mask(draws([10 + 2**33, 11 + 2**33, 12 + 2**33, 13 + 2**33])),
    }
    for what, other in changed.items():
        agree = (other == whole).float().mean().item()
        assert agree == pytest.approx((1 - RATE) ** 2 + RATE**2, abs=0.02), what


def test_what_stays_is_scaled_and_keeps_its_dtype() -> None:
    x = torch.ones(B, S, D, dtype=torch.float64)
    out = dropout(x, RATE, draws(), 0)
    assert out.dtype == torch.float64
    assert set(out.unique().tolist()) == {0.0, 1.0 / (1.0 - RATE)}


def test_the_decoder_drops_only_when_given_draws() -> None:
    model = Decoder(preset("tiny-llama", dropout=0.3))
    plain = Decoder(preset("tiny-llama"))
    for decoder in (model, plain):
        initialise(decoder, 0)
    tokens = torch.randint(0, 512, (4, 16))
    dropped = model(tokens, draws=draws())
    assert torch.equal(model(tokens), plain(tokens))
    assert not torch.equal(dropped, model(tokens))
    torch.testing.assert_close(model(tokens[2:], draws=draws([12, 13])), dropped[2:])


class Ones(nn.Module):
    """Adds one to every place of the residual stream."""

    def forward(self, x_BSD: Tensor, *_: object) -> Tensor:
        return torch.ones_like(x_BSD)


def test_every_half_of_every_layer_draws_for_itself() -> None:
    model = Decoder(preset("tiny-llama", dropout=RATE))
    model.final_norm = model.head = None
    nn.init.zeros_(model.embed.weight)
    for block in model.layers.values():
        block.attention = block.ffn = Ones()
    kept = model(torch.zeros(B, S, dtype=torch.int64), draws=draws()) * (1.0 - RATE)
    halves = [(layer, site) for layer in range(len(model.layers)) for site in (AFTER_ATTENTION, AFTER_FEEDFORWARD)]
    masks = [keep_mask(draws().at_layer(layer), RATE, site, S, model.shape.width) for layer, site in halves]
    torch.testing.assert_close(kept, torch.stack(masks).sum(0).to(kept.dtype))
