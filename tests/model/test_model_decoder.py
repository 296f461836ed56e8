"""The decoder cut into stages, with a replaced attention, in other dtypes, and beyond its positions."""

import pytest
import torch
from model_shapes import TINY, preset

from meshwright.cost import decoder_cost
from meshwright.errors import UserError
from meshwright.model import CausalAttend, Decoder, initialise


def stage(whole: Decoder, first: int, last: int) -> Decoder:
    """Layers first to last of a decoder, with the ends only where they belong."""
    piece = Decoder(whole.shape)
    initialise(piece, 0)
    for name in list(piece.layers):
        if not first <= int(name) <= last:
            del piece.layers[name]
    if first > 0:
        piece.embed = piece.position_embed = None
    if last < whole.shape.layers - 1:
        piece.final_norm = piece.head = None
    return piece


@pytest.mark.parametrize("name", TINY)
def test_stages_in_turn_equal_the_whole(name: str) -> None:
    whole = Decoder(preset(name))
    initialise(whole, 0)
    first, second = stage(whole, 0, 0), stage(whole, 1, 1)
    assert {*dict(first.named_parameters()), *dict(second.named_parameters())} >= set(dict(whole.named_parameters()))
    tokens, labels = torch.randint(0, 512, (2, 24)), torch.randint(0, 512, (2, 24))
    hidden = first(tokens)
    assert hidden.shape == (2, 24, 64)
    assert torch.equal(second(hidden), whole(tokens))
    assert torch.equal(second(hidden, labels, 48), whole(tokens, labels, 48))
    if whole.shape.experts is not None:
        return
    sizes = (whole.shape, 2, 24, 4)
    costs = [decoder_cost(*sizes, layers=range(1), last=False), decoder_cost(*sizes, layers=range(1, 2), first=False)]
    both = {**costs[0].saved_bytes, **costs[1].saved_bytes}
    assert both == decoder_cost(*sizes).saved_bytes
    held = [sum(parameter.numel() for parameter in stage.parameters()) for stage in (first, second)]
    assert [cost.parameters for cost in costs] == held


def test_attention_is_replaceable() -> None:
    model = Decoder(preset("tiny-llama"))
    initialise(model, 0)
    tokens, positions = torch.randint(0, 512, (1, 8)), torch.arange(8).unsqueeze(0)
    seen = []

    class Recorder(CausalAttend):
        def __call__(self, q, k, v, positions, documents, sinks=None):
            seen.append((tuple(q.shape), tuple(k.shape), positions))
            return super().__call__(q, k, v, positions, documents)

    before = model(tokens)
    for block in model.layers.values():
        block.attention.attend = Recorder()
    assert torch.equal(model(tokens, positions=positions), before)
    assert seen == [((1, 8, 4, 16), (1, 8, 2, 16), positions)] * 2


def test_bfloat16_follows_float32() -> None:
    shape = preset("tiny-qwen3", layers=1)
    wide, narrow = Decoder(shape), Decoder(shape)
    initialise(wide, 0)
    initialise(narrow, 0)
    narrow.bfloat16()
    tokens = torch.randint(0, 512, (1, 12))
    out = narrow(tokens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide(tokens), rtol=0, atol=0.02)


def test_rotary_positions_are_exact_far_out() -> None:
    """Scores depend on distances alone, also a hundred thousand tokens in."""
    model = Decoder(preset("tiny-llama")).double()
    initialise(model, 0)
    tokens, positions = torch.randint(0, 512, (1, 16)), torch.arange(16).unsqueeze(0)
    torch.testing.assert_close(model(tokens, positions=positions + 100_000), model(tokens), rtol=0, atol=1e-9)


def test_learned_positions_end_where_the_table_ends() -> None:
    with pytest.raises(UserError, match="max_sequence_length = 128"):
        Decoder(preset("tiny-gpt2"))(torch.zeros(1, 129, dtype=torch.int64))
