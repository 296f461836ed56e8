"""The head in fp8: its loss and gradients against a sequential reference, by chunks, whole and cut, and refusals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright.cost.head as cuts
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model.head import IGNORE, Head, Products, chunked_loss, loss_of_logits
from meshwright.parallel import World, build
from meshwright.parallel.fp8_head import Fp8Products, use_fp8_in_head
from meshwright.verify import observe, run_ranks

VOCABULARY, WIDTH, TOKENS = 53, 64, 96


def make_job(*, fp8_head: bool = True, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": {
                "vocab_size": 50, "width": 32, "layers": 2, "heads": 2, "head_dim": 16, "ffn_width": 64,
                "max_sequence_length": 16,
            },
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": 2, "micro_batch": 1},
            "precision": {"compute": "fp8", "fp8_head": fp8_head},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "layout": layout,
            "run": {"steps": 2},
        }
    )  # fmt: skip


def operands(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.1).to(device, torch.bfloat16)
    labels = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator).to(device)
    labels[0, 3:7] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = (x.abs().max().float() / torch.finfo(dtype).max).double()
    return (x.double() / scale).to(dtype).double() * scale


def sequential_reference(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64 but for operands of products, which are rounded to fp8, a chunk at a time."""
    hidden, labels = hidden.detach()[0], labels[0]
    weight_q, count = rounded(weight.detach(), torch.float8_e4m3fn), float((labels != IGNORE).sum())
    loss, of_hidden, of_weight = torch.zeros((), dtype=torch.float64), [], torch.zeros(VOCABULARY, WIDTH).double()
    for start in range(0, TOKENS, rows):
        chunk = slice(start, start + rows)
        hidden_q = rounded(hidden[chunk], torch.float8_e4m3fn)
        logits = (hidden_q @ weight_q.t()).bfloat16().double().requires_grad_()
        part = F.cross_entropy(logits, labels[chunk], ignore_index=IGNORE, reduction="sum") / count
        part.backward()
        assert logits.grad is not None
        grad_q = rounded(logits.grad.bfloat16(), torch.float8_e5m2)
        loss += part.detach()
        of_hidden.append(grad_q @ weight_q)
        of_weight += grad_q.t() @ hidden_q
    return loss, torch.cat(of_hidden), of_weight


def run(hidden: Tensor, weight: Tensor, labels: Tensor, products: type[Products]) -> tuple[Tensor, Tensor, Tensor]:
    loss = chunked_loss(hidden, weight, labels, (labels != IGNORE).sum(), loss_of_logits, products=products)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    results = loss.detach(), hidden.grad[0], weight.grad
    hidden.grad = weight.grad = None
    return results


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [TOKENS, 32])
def test_loss_and_gradients_are_those_of_the_sequential_reference(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    hidden, weight, labels = operands()
    monkeypatch.setattr(cuts, "CHUNK_LOGITS_BYTES", rows * 2 * VOCABULARY)
    expected, plain = sequential_reference(hidden, weight, labels, rows), run(hidden, weight, labels, Products)
    for value, reference, wide in zip(run(hidden, weight, labels, Fp8Products), expected, plain, strict=True):
        assert distance(value, reference) < 2**-8
        assert 2**-13 < distance(wide, reference) < 2**-3  # fp8 is not bf16, and not far from it


def test_the_loss_differs_little_without_gradients_too() -> None:
    hidden, weight, labels = operands()
    with torch.no_grad():
        alone = chunked_loss(hidden, weight, labels, 92.0, loss_of_logits, products=Fp8Products)
    assert torch.equal(alone, run(hidden, weight, labels, Fp8Products)[0])


def test_the_head_of_the_last_stage_changes_where_it_is_asked_for() -> None:
    world = World(torch.device("cpu"))
    for asked in (False, True):
        engine, _ = build(make_job(fp8_head=asked), world)
        [head] = [module for module in engine.modules[0].modules() if isinstance(module, Head)]
        assert head.products is (Fp8Products if asked else Products)
    [exact] = build(make_job(), world, torch.float64)[0].modules  # a check in another format is one without fp8
    assert not any(getattr(module, "products", None) is Fp8Products for module in exact.modules())
    with pytest.raises(UserError, match=r"precision.fp8_head = true needs a head of meshwright.model.head") as caught:
        use_fp8_in_head(nn.ModuleDict({"head": nn.Linear(16, 16)}))
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_layouts_that_do_not_cut_the_head_compute_what_one_process_does(layout: dict[str, Any]) -> None:
    [alone] = run_ranks(observe, 1, make_job(), None)
    [other] = run_ranks(observe, 1, make_job(fp8_head=False), None)
    assert alone.losses != other.losses
    for rank in run_ranks(observe, 2, make_job(**layout), None):
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_the_head_follows_the_reference() -> None:
    hidden, weight, labels = operands("cuda")
    expected = sequential_reference(hidden.cpu(), weight.cpu(), labels.cpu(), TOKENS)
    for value, reference in zip(run(hidden, weight, labels, Fp8Products), expected, strict=True):
        assert distance(value.cpu(), reference) < 2**-6
