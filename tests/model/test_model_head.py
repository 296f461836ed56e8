"""The chunked loss equals plain cross-entropy, adds over micro-batches, and keeps no logits."""

import pytest
import torch
import torch.nn.functional as F

import meshwright.cost.head as cuts
import meshwright.model.head as head_module
from meshwright.job.model import Model
from meshwright.model import IGNORE
from meshwright.model.head import Head


def made(dtype: torch.dtype = torch.float64, vocab: int = 37) -> tuple[Head, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = Head(Model(vocab_size=vocab, width=8)).to(dtype)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(2, 9, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (2, 9))
    labels[0, 2:5] = IGNORE
    return head, hidden, labels


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, of))


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("count", [15, torch.tensor(15)])
def test_equals_plain_cross_entropy(rows: int, count: int | torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, labels = made()
    monkeypatch.setattr(cuts, "CHUNK_LOGITS_BYTES", rows * 4 * 37)
    plain = F.cross_entropy(head.logits(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / 15
    loss = head(hidden, labels, count)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    ours, theirs = gradients(3 * loss, hidden, head.weight), gradients(3 * plain, hidden, head.weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, labels, count), plain, rtol=1e-12, atol=0)


def test_micro_batches_add_up() -> None:
    head, hidden, labels = made()
    whole = head(hidden, labels, 15)
    parts = head(hidden[:1], labels[:1], 15) + head(hidden[1:], labels[1:], 15)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [0, 7])
def test_nothing_valid_gives_zero(count: int) -> None:
    head, hidden, labels = made()
    loss = head(hidden, torch.full_like(labels, IGNORE), count)
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(loss, hidden, head.weight))


def test_bfloat16_loss_is_float32_and_gradients_follow_their_tensors() -> None:
    head, hidden, labels = made(torch.bfloat16)
    loss = head(hidden, labels, 15)
    assert loss.dtype == torch.float32
    reference = F.cross_entropy(head.logits(hidden).float().flatten(0, 1), labels.flatten(), reduction="sum") / 15
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    for ours, theirs in zip(
        gradients(loss, hidden, head.weight), gradients(reference, hidden, head.weight), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


def test_saved_bytes_do_not_grow_with_vocabulary_times_sequence() -> None:
    def kept(tokens: int, vocab: int) -> int:
        head = Head(Model(vocab_size=vocab, width=8))
        torch.nn.init.normal_(head.weight)
        hidden, total = torch.randn(1, tokens, 8, requires_grad=True), 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.itemsize
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            head(hidden, torch.zeros(1, tokens, dtype=torch.int64), tokens)
        return total

    assert kept(64, 512) == 4 * 8 * (64 + 512)


def test_labels_without_a_count_are_refused() -> None:
    head, hidden, labels = made()
    with pytest.raises(ValueError, match="valid_count"):
        head(hidden, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_is_the_eager_one(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 37).to(dtype), torch.randint(0, 37, (6, 1))
    labels[2] = IGNORE
    shares = (labels != IGNORE).float() / 5
    compiled = torch.compile(head_module.loss_of_logits, backend="aot_eager", dynamic=False)
    for ours, theirs in zip(
        compiled(logits.clone(), labels, shares, True),
        head_module.loss_of_logits(logits.clone(), labels, shares, True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_chunks_are_even_and_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "CHUNK_LOGITS_BYTES", 2 * 1000 * 600)
    assert [cuts.chunk_rows(tokens, 1000, 2) for tokens in (1, 100, 600, 601, 4096)] == [1, 100, 640, 384, 640]
