"""Causal attention on the CPU against scores written out, with groups, windows, documents and a cache."""

import math

import pytest
import torch
from model_shapes import preset

from meshwright.model import CausalAttend, Decoder, Documents, KVCache, initialise

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 6, 6, 7]])


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bshe,bthe->bhst", q, k.repeat_interleave(groups, 2)) / math.sqrt(q.shape[3])
    for s in range(queries):
        for t in range(keys):
            place = keys - queries + s
            if t > place or (window is not None and place - t >= window):
                scores[:, :, s, t] = -math.inf
            elif documents is not None:
                scores[documents[:, place] != documents[:, t], :, s, t] = -math.inf
    out = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v.repeat_interleave(groups, 2))
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 3, 10])
@pytest.mark.parametrize(("queries", "documents"), [(10, None), (4, None), (1, None), (10, DOCUMENTS)])
def test_equals_attention_written_out(window: int | None, documents: torch.Tensor | None, queries: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 10, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, lse = CausalAttend(window)(q, k, v, None, None if documents is None else Documents(documents))
    expected, expected_lse = written_out(q, k, v, window, documents)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_boundaries_have_one_length_whatever_the_documents() -> None:
    boundaries = Documents(DOCUMENTS).bounded().boundaries
    assert boundaries.dtype == torch.int32
    assert boundaries.tolist() == [0, 3, 7, 10, 11, 19] + [20] * 15
    assert Documents(torch.zeros(2, 10, dtype=torch.int64)).bounded().boundaries.tolist() == [0, 10] + [20] * 19
    assert Documents(torch.arange(20).view(2, 10)).bounded().boundaries.tolist() == list(range(21))
    assert Documents(DOCUMENTS, at_most=8).bounded().boundaries.tolist() == boundaries[:9].tolist()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_a_packed_document_gives_what_it_gives_alone(name: str) -> None:
    model = Decoder(preset(name)).double()
    initialise(model, 0)
    tokens = torch.randint(0, 512, (1, 20))
    documents = torch.tensor([[0] * 8 + [1] * 12])
    positions = torch.cat((torch.arange(8), torch.arange(12))).unsqueeze(0)
    packed = model(tokens, positions=positions, documents=Documents(documents))
    alone = torch.cat((model(tokens[:, :8]), model(tokens[:, 8:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen3", "tiny-gpt2"])
def test_generation_step_by_step_equals_one_pass(name: str) -> None:
    model = Decoder(preset(name)).double()
    initialise(model, 0)
    tokens = torch.randint(0, 512, (2, 40))
    whole = model(tokens)
    cache, parts = KVCache(), []
    for piece in tokens.split([25, 1, 1, 5, 8], dim=1):
        parts.append(model(piece, cache=cache))
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_a_cache_and_documents_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cache"):
        Decoder(preset("tiny-llama"))(
            torch.zeros(1, 2, dtype=torch.int64), documents=Documents(DOCUMENTS), cache=KVCache()
        )
