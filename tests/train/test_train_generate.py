"""Generation: greedy, nucleus, seeds, limits."""

import copy

import pytest
import torch

from meshwright.errors import UserError
from meshwright.job import Model, model_preset
from meshwright.model import Decoder, initialise
from meshwright.torch_private.compiler import graphs_and_stops
from meshwright.train import generate


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = Decoder(Model(**model_preset("tiny-llama")))
    initialise(decoder, 3)
    with torch.no_grad():
        decoder.head.weight.mul_(30)  # far from uniform, so that draws differ from each other
    return decoder


def test_greedy_takes_what_the_full_forward_would(model: Decoder) -> None:
    tokens = [1, 2, 3]
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [1, 2, 3], 6, temperature=0) == tokens[3:]


def test_compiled_blocks_generate_without_being_compiled_again(model: Decoder) -> None:
    compiled = copy.deepcopy(model)
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend="eager")
    graphs, _ = graphs_and_stops()
    assert generate(compiled, [1, 2, 3], 6, temperature=0) == generate(model, [1, 2, 3], 6, temperature=0)
    assert graphs_and_stops()[0] == graphs


def test_a_seed_gives_the_same_text_and_another_seed_another(model: Decoder) -> None:
    texts = [generate(model, [5], 12, temperature=1.5, top_p=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_narrow_nucleus_is_greedy(model: Decoder) -> None:
    assert generate(model, [7], 5, temperature=1.0, top_p=0.0) == generate(model, [7], 5, temperature=0)


def test_ids_beyond_the_tokenizer_are_never_drawn(model: Decoder) -> None:
    assert max(generate(model, [7], 30, temperature=50.0, top_p=1.0, vocab_size=20)) < 20


def test_it_ends_at_the_stop_token(model: Decoder) -> None:
    free = generate(model, [1, 2, 3], 6, temperature=0)
    assert generate(model, [1, 2, 3], 6, temperature=0, stop={free[2]}) == free[: free.index(free[2])]


def test_more_than_the_model_can_hold_is_refused(model: Decoder) -> None:
    with pytest.raises(UserError, match="ask for at most 126 tokens"):
        generate(model, [1, 2], 127)
