"""A model that listens: Whisper's encoder as transformers computes it, tokens at their places, and what is refused."""

from typing import Any

import pytest
import torch

from meshwright.job.model import Model
from meshwright.model import Decoder, Media, initialise
from meshwright.model.audio import sinusoids

SOUND = 7
SHAPE = Model(
    vocab_size=50,
    width=32,
    layers=2,
    heads=4,
    audio={"mels": 6, "seconds": 0.07, "width": 24, "layers": 2, "heads": 4, "windows": 2, "audio_token": SOUND},
)


def test_windows_take_their_places_and_no_others() -> None:
    model = Decoder(SHAPE).double()
    initialise(model, seed=0)
    seen = {}
    model.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.update(hidden=inputs[0]))
    tokens = torch.arange(2 * 12).view(2, 12) % 50
    items_BK = torch.randn(2, 2, 6, 7)
    places_BKT = torch.tensor([[[1, 2, 3, 4], [8, 9, -1, -1]], [[-1] * 4, [0, 1, 2, 3]]])
    model(tokens)
    plain = seen["hidden"]
    model(tokens, media=Media(items_BK, places_BKT))
    assert model.audio is not None
    encoded = model.audio(items_BK)
    expected = plain.clone()
    expected[0, 1:5], expected[0, 8:10], expected[1, :4] = encoded[0, 0], encoded[0, 1, :2], encoded[1, 1]
    assert torch.equal(seen["hidden"], expected)


def test_positions_are_those_of_whisper() -> None:
    modeling = pytest.importorskip("transformers.models.whisper.modeling_whisper")
    expected = modeling.sinusoids(1500, 384)
    torch.testing.assert_close(sinusoids(1500, 384, torch.device("cpu")).float(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"heads": 5}, "model.audio.heads = 5 does not divide"),
        ({"width": 25, "heads": 5}, "model.audio.width = 25 holds no sines and cosines"),
        ({"audio_token": 50}, "model.audio.audio_token = 50 is outside model.vocab_size = 50"),
        ({"seconds": 0.0}, "seconds"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], match: str) -> None:
    assert SHAPE.audio is not None
    with pytest.raises(ValueError, match=match):
        Model(**SHAPE.model_dump() | {"audio": SHAPE.audio.model_dump() | fields})


@pytest.mark.parametrize("fields", [{"extra_tokens": 1}, {"adapter": {}}, {"file": "own.py"}, {"vision": {}}])
def test_what_is_not_supported_with_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.audio"):
        Model(**SHAPE.model_dump() | fields)
