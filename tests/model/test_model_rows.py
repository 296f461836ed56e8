"""Rows for experts: what is gathered, weighted and summed in kernels equals the same with torch's operations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.job import Model
from meshwright.model import Decoder, initialise, moe
from meshwright.model.moe import MixtureOfExperts

EXPERTS = {"count": 6, "top_k": 2, "ffn_width": 8}


def mixture(dtype: torch.dtype = torch.float64, **changes: object) -> MixtureOfExperts:
    model = Decoder(Model(vocab_size=32, width=16, layers=1, heads=2, experts=EXPERTS | changes)).to(dtype)
    initialise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
    found = model.layers["0"].moe
    assert isinstance(found, MixtureOfExperts)
    return found


def results(layer: MixtureOfExperts, x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    return [out.detach(), *torch.autograd.grad(out, [leaf, *layer.parameters()], seed)]


def test_weights_before_the_last_product_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it saves a pass over memory; here without kernels."""
    layer, x, seed = mixture(scale=2.5), *torch.randn(2, 2, 9, 16, dtype=torch.float64)
    after = results(layer, x, seed)
    monkeypatch.setattr(moe, "has_kernels", lambda rows: True)
    monkeypatch.setattr(moe.SortedByExpert, "combined", None)  # not to be used
    for own, other in zip(results(layer, x, seed), after, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("changes", [{"linear_bias": True}, {"experts": EXPERTS | {"swiglu_limit": 7.0}}])
def test_biases_are_weighted_too(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]) -> None:
    """So weights come after the last product where it has one."""
    shape = Model.model_validate({"vocab_size": 32, "width": 16, "layers": 1, "experts": EXPERTS, **changes})
    monkeypatch.setattr(moe, "has_kernels", lambda rows: True)
    layer = MixtureOfExperts(shape, shape.experts)
    assert not layer._weighs_inside(torch.zeros(1))


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TRITON, reason="Triton comes with torch for GPUs")
def test_kernels_equal_torchs_operations() -> None:
    """In Triton's interpreter, which needs no GPU."""
    script = Path(__file__).with_name("rows_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["inside", "after"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_a_gpu_equals_the_cpu(dtype: torch.dtype, bound: float, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With uneven groups of any length and an expert without tokens, the products in one kernel in bf16."""
    torch.manual_seed(0)
    if place == "after":  # as with expert parallelism
        monkeypatch.setattr(MixtureOfExperts, "_weighs_inside", lambda self, rows: False)
    experts = {"count": 12, "top_k": 3, "ffn_width": 160}
    layer = MixtureOfExperts(shape := Model(width=192, layers=1, heads=2, experts=experts), shape.experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.15)
        layer.router.preference.zero_()
        layer.router.preference[5] = -1e4
    x, seed = torch.randn(2, 3, 701, 192).to(dtype)
    layer = layer.to(dtype)
    exact = results(layer.double(), x.double(), seed.double())
    # The choice of experts depends on the last bits: it is that of float64.
    chosen = layer.router(x.double()).chosen_BSK
    assert not (chosen == 5).any()
    layer = layer.to("cuda", dtype)
    layer.router.preference = layer.router.preference.float()
    monkeypatch.setattr(layer.router, "_choose", lambda scores: chosen.cuda())
    ours, again = (results(layer, x.cuda(), seed.cuda()) for _ in range(2))
    for own, repeated, expected in zip(ours, again, exact, strict=True):
        assert torch.equal(own, repeated)
        assert own.isfinite().all()
        assert (own.double().cpu() - expected).norm() <= bound * expected.norm()
