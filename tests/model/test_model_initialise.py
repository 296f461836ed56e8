"""First values depend on seed and names alone, and any rows can be drawn without the rest."""

import math

import pytest
import torch
from model_shapes import preset

from meshwright.model import Decoder, initial_rows, initialise
from meshwright.model.initialise import draw_rows


def test_slices_and_padded_matrices_equal_the_whole() -> None:
    whole = draw_rows("layers.0.ffn.up.weight", (1300, 24), 0.02, 7, slice(None))
    assert whole.shape == (1300, 24)
    for start, stop in [(0, 5), (500, 530), (511, 1030), (1024, 1300), (0, 1300), (7, 7)]:
        assert torch.equal(
            draw_rows("layers.0.ffn.up.weight", (1300, 24), 0.02, 7, slice(start, stop)), whole[start:stop]
        )
    padded = draw_rows("layers.0.ffn.up.weight", (1536, 24), 0.02, 7, slice(0, 1300))
    assert torch.equal(padded, whole)


def test_seed_name_and_block_each_change_the_draw() -> None:
    def draw(name: str, seed: int, start: int = 0) -> torch.Tensor:
        return draw_rows(name, (1024, 24), 1.0, seed, slice(start, start + 512))

    drawn = [draw("a", 0), draw("b", 0), draw("a", 1), draw("a", 0, 512)]
    assert all(abs(torch.corrcoef(torch.stack((x.flatten(), y.flatten())))[0, 1]) < 0.05 for x, y in pairs(drawn))


def pairs(items: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(items[i], items[j]) for i in range(len(items)) for j in range(i)]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-qwen3"])
def test_every_parameter_has_its_kind_of_value(name: str) -> None:
    shape = preset(name, vocab_size=2000)
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device="cpu")
    assert (model.head.weight is model.embed.weight) == shape.tied
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    initialise(model, 3)
    for key, parameter in model.named_parameters():
        if key.endswith(".bias"):
            assert (parameter == 0).all(), key
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), key
        else:
            residual = key.endswith(("o.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 2 if residual else 0.02, rel=0.1), key
            assert torch.equal(parameter[3:9], initial_rows(shape, key, parameter.shape, 3, slice(3, 9)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_a_job_may_set_how_large_values_are(name: str) -> None:
    shape = preset(name, vocab_size=2000, init_std=0.006, embed_std=0.5)
    model = Decoder(shape)
    initialise(model, 0)
    deviations = {key: parameter.std().item() for key, parameter in model.named_parameters() if parameter.dim() > 1}
    assert deviations.pop("embed.weight") == pytest.approx(0.5, rel=0.1)
    assert deviations.pop("head.weight", 0.006) == pytest.approx(0.006, rel=0.1)
    for key, deviation in deviations.items():
        residual = key.endswith(("o.weight", "down.weight"))
        assert deviation == pytest.approx(0.006 / math.sqrt(2 * shape.layers) if residual else 0.006, rel=0.1), key
    apart = initial_rows(shape, "head.weight", (2000, shape.width), 0, slice(None))
    assert torch.equal(apart, model.head.weight)


def test_dtype_changes_only_the_rounding() -> None:
    narrow, wide = Decoder(preset("tiny-llama")), Decoder(preset("tiny-llama")).double()
    initialise(narrow, 0)
    initialise(wide, 0)
    assert all(torch.equal(a.double(), b) for a, b in zip(narrow.parameters(), wide.parameters(), strict=True))


def test_a_tied_head_held_apart_begins_as_its_table() -> None:
    shape = preset("tiny-qwen2")
    head, table = (initial_rows(shape, key, (512, 64), 0, slice(None)) for key in ("head.weight", "embed.weight"))
    assert torch.equal(head, table)


def test_values_stay_the_same_from_release_to_release() -> None:
    first = draw_rows("embed.weight", (512, 4), 0.02, 0, slice(0, 1))[0]
    known = [0.0020560077, 0.0102675697, -0.0307662878, 0.0134868836]
    torch.testing.assert_close(first, torch.tensor(known), rtol=1e-5, atol=1e-8)
