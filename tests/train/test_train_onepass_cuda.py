"""On a GPU the update in one pass is torch's AdamW, with the working copy, the clipping and 16-bit gradients in it."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data import prepare
from meshwright.job import Job
from meshwright.parallel import OneStage, World, build
from meshwright.train import Silent, Trainer
from meshwright.train.optimizer import OnePassAdamW, clip_gradients
from meshwright.train.optimizer import build as optimizers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("large", [100, 2**23], ids=["one by one", "together"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_masters_moments_and_copies_are_those_of_separate_passes(
    narrow: torch.dtype, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.optimizer.adamw_kernel.LARGE", large)
    torch.manual_seed(0)
    shapes = ((300, 17), (4097,), (1,), (4096,), (3, 4096))
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    theirs = [nn.Parameter(master.detach().clone()) for master in ours]
    working = {master: torch.zeros(master.shape, dtype=torch.bfloat16, device="cuda") for master in ours}
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    one = OnePassAdamW([{"params": ours, "weight_decay": 0.1}], working, **settings)
    apart = torch.optim.AdamW(theirs, weight_decay=0.1, fused=True, **settings)
    for step in range(4):
        gradients = [torch.randn(shape, device="cuda").to(narrow) for shape in shapes]
        for master, other, gradient in zip(ours, theirs, gradients, strict=True):
            master.grad_dtype = narrow
            master.grad, other.grad = gradient, gradient.float().clone()
        one.factor = 0.25 if step % 2 else 1.0
        clip_gradients(theirs, 4.0, 1.0 if step % 2 else 8.0)
        one.step()
        apart.step()
    for master, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(master, other, rtol=1e-5, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[master][key], apart.state[other][key], rtol=1e-5, atol=1e-6)
        assert torch.equal(working[master], master.to(torch.bfloat16))


@pytest.mark.parametrize("large", [100, 2**23], ids=["one by one", "together"])
@pytest.mark.parametrize("bad", ["loss", "norm", None], ids=str)
def test_a_launched_update_is_clipped_and_left_out_by_the_gpu(
    bad: str | None, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.optimizer.adamw_kernel.LARGE", large)
    torch.manual_seed(0)
    shapes = ((300, 17), (4096,), (3, 4096))
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    before = [master.detach().clone() for master in ours]
    working = {master: torch.zeros(master.shape, dtype=torch.bfloat16, device="cuda") for master in ours}
    theirs = [nn.Parameter(master.detach().clone()) for master in ours]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    one = OnePassAdamW([{"params": ours, "weight_decay": 0.1}], working, **settings)
    apart = torch.optim.AdamW(theirs, weight_decay=0.1, fused=True, **settings)
    for master, other in zip(ours, theirs, strict=True):
        master.grad = torch.randn(master.shape, device="cuda")
        other.grad = master.grad.clone()
    squares = torch.stack([master.grad.double().square().sum() for master in ours]).sum()
    loss = torch.tensor(float("nan") if bad == "loss" else 2.0, device="cuda")
    one.collect()
    one.launch_if_finite(loss, squares * (float("inf") if bad == "norm" else 1.0), 0.5)
    if bad:
        one.forget()
        assert all(torch.equal(master, old) for master, old in zip(ours, before, strict=True))
        assert not any(copy.any() for copy in working.values())
        assert all(float(one.state[master]["step"]) == 0 for master in ours)
        return
    one.step()
    clip_gradients(theirs, float(squares.sqrt()), 0.5)
    apart.step()
    for master, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(master, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(working[master], master.to(torch.bfloat16))
        assert float(one.state[master]["step"]) == 1


@pytest.mark.parametrize("policy", ["skip", "keep"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_run_goes_as_with_torchs_own(
    compute: str, accumulation: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step whose loss is not finite, which is left out; whoever decides, the host or the GPU."""
    shape = {"vocab_size": 512, "width": 64, "layers": 2, "heads": 4, "ffn_width": 128, "max_sequence_length": 64}
    job = Job.model_validate(
        {
            "model": shape,
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 64, "global_batch": 4, "micro_batch": 4 // accumulation},
            "precision": {"compute": compute},
            "optimizer": {"lr": 1e-3, "clip": 0.5},
            "evaluation": {"every_steps": 0},
            "run": {"steps": 8, "on_bad_step": policy},
        }
    )
    whole = OneStage.accumulate

    def spoiled(engine: OneStage, data: Any, step: int) -> torch.Tensor:
        loss = whole(engine, data, step)
        return loss * float("nan") if step == 4 and policy == "skip" else loss

    monkeypatch.setattr(OneStage, "accumulate", spoiled)

    class Losses(Silent):
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def metric(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    def losses() -> tuple[list[float], str]:
        world, seen = World(torch.device("cuda")), Losses()
        engine, weights = build(job, world)
        corpus = prepare(job.data, job.model.vocab_size)
        training = Trainer(job, corpus, engine, weights, seen, seen, world)  # type: ignore[arg-type]
        training.run()
        return [row["loss"] for row in seen.rows], type(training.optimizer).__name__

    ours, kind = losses()
    monkeypatch.setattr(optimizers, "one_pass_here", lambda *_: False)
    monkeypatch.setattr("meshwright.parallel.apply.one_pass_here", lambda *_: False)
    theirs, other = losses()
    assert (kind, other) == ("OnePassAdamW", "AdamW")
    assert ours == pytest.approx(theirs, rel=2e-4, nan_ok=True)
    assert math.isnan(ours[3]) == (policy == "skip")
