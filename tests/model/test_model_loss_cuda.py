"""On a GPU the kernel by hand gives the cross-entropy and the gradient of float64, in the logits' own memory."""

import pytest
import torch

from meshwright.model.head import IGNORE, chunked_loss, loss_of_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
@pytest.mark.parametrize("vocabulary", [5, 16384, 50257])
def test_loss_and_gradient_are_float64s(vocabulary: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, vocabulary, device="cuda")).to(dtype)
    labels = torch.randint(0, vocabulary, (9, 1), device="cuda")
    labels[2], labels[3], labels[4] = IGNORE, 0, vocabulary - 1
    shares = torch.where(labels == IGNORE, 0.0, 0.25)
    exact, grad = loss_of_logits(logits.cpu().double(), labels.cpu(), shares.cpu().double(), True)
    only, nothing = loss_of_logits(logits.clone(), labels, shares, False)
    loss, gradient = loss_of_logits(logits, labels, shares, True)
    assert gradient is not None and grad is not None and nothing is None
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(only, loss)
    assert abs(float(loss.sum()) - float(exact.sum())) < 1e-5 * float(exact.sum())
    assert (gradient.cpu().double() - grad).abs().max() / grad.abs().max() < bound
    assert not gradient[2].any()


def test_rows_of_another_length_than_the_vocabulary_change_nothing() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(5003, 64, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, 5003, (2, 300), device="cuda")
    loss = chunked_loss(hidden, weight, labels, 600.0, loss_of_logits)
    loss.backward()
    exact, wide = hidden.detach().cpu().double().requires_grad_(), weight.detach().cpu().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy((exact @ wide.t()).flatten(0, 1), labels.cpu().flatten())
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    for ours, theirs in ((hidden, exact), (weight, wide)):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad.cpu().double() - theirs.grad).abs().max() / theirs.grad.abs().max() < 0.02
