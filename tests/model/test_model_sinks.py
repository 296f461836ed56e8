"""Sinks equal the softmax with one more column, and latent attention with a cache equals that without."""

import pytest
import torch

from meshwright.job import Model
from meshwright.model import CausalAttend, Decoder, Documents, KVCache, initialise
from meshwright.model.sinks import Sinks, by_formula

SINKS = {"sinks": True, "sliding_window": 5, "window_layers": "alternate"}
LATENT = {"head_dim": 12, "latent": {"kv_rank": 10, "q_rank": 9, "rope_dim": 4, "value_dim": 6}}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]]])
def test_results_and_gradients_are_those_of_the_formula(window: int | None, documents: list[list[int]] | None) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 7, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
    ids = None if documents is None else Documents(torch.tensor(documents))
    attend, found = CausalAttend(window), []
    for by_kernel in (True, False):
        draw.manual_seed(0)
        q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes)
        sinks = Sinks(4).double()
        sinks.weight.data = torch.tensor([-1.0, 0.0, 0.7, 3.0], dtype=torch.float64)
        visible = attend.visible(q, k, ids)
        out = attend(q, k, v, None, ids, sinks.weight)[0] if by_kernel else by_formula(q, k, v, sinks.weight, visible)
        (out * torch.randn(out.shape, generator=draw, dtype=torch.float64)).sum().backward()
        found.append([out, q.grad, k.grad, v.grad, sinks.weight.grad])
    for ours, exact in zip(*found, strict=True):
        assert exact.abs().max() > 0
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("traits", [SINKS, LATENT], ids=["sinks", "latent"])
def test_tokens_one_at_a_time_equal_all_at_once(traits: dict[str, object]) -> None:
    decoder = Decoder(Model.model_validate({"vocab_size": 50, "width": 24, "layers": 2, "heads": 4} | traits))
    initialise(decoder, 0)
    decoder.double()
    tokens, cache = torch.randint(0, 50, (2, 9)), KVCache()
    with torch.no_grad():
        steps = [
            decoder(tokens[:, :4], cache=cache),
            *(decoder(tokens[:, i : i + 1], cache=cache) for i in range(4, 9)),
        ]
        torch.testing.assert_close(torch.cat(steps, 1), decoder(tokens), rtol=1e-10, atol=1e-12)


def test_only_every_second_layer_has_the_window() -> None:
    shape = Model.model_validate({"layers": 3} | SINKS)
    assert [shape.window(layer) for layer in range(3)] == [5, None, 5]
