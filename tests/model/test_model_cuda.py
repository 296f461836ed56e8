"""On a GPU every attention path equals the CPU's in float64, and training passes agree with the CPU."""

import pytest
import torch
from model_shapes import TINY, preset

from meshwright.model import CausalAttend, Decoder, Documents, Draws, initialise, routers
from meshwright.model.sinks import Sinks

pytestmark = pytest.mark.gpu

DOCUMENTS = torch.tensor([[0] * 70 + [1] * 3 + [2] * 55, [4] * 127 + [5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 16, 128])
@pytest.mark.parametrize(("queries", "documents"), [(128, None), (5, None), (1, None), (128, DOCUMENTS)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_path_equals_the_cpu(
    dtype: torch.dtype, window: int | None, documents: torch.Tensor | None, kv_heads: int, queries: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, 64, dtype=dtype)
    k, v = (torch.randn(2, 128, kv_heads, 64, dtype=dtype) for _ in range(2))
    weights = torch.randn(2, queries, 4, 64, dtype=dtype)

    def run(device: str, compute: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.to(device, compute).requires_grad_() for tensor in (q, k, v)]
        ids = None if documents is None else Documents(documents.to(device), at_most=8)
        out, _ = CausalAttend(window)(inputs[0], inputs[1], inputs[2], None, ids)
        gradients = torch.autograd.grad((out * weights.to(device, compute)).sum(), inputs)
        return [tensor.detach().cpu().double() for tensor in (out, *gradients)]

    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for ours, expected in zip(run("cuda", dtype), run("cpu", torch.float64), strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("queries", "documents"), [(128, None), (5, None), (128, DOCUMENTS)])
def test_sinks_equal_the_cpu(
    dtype: torch.dtype, window: int | None, queries: int, documents: torch.Tensor | None
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, queries, 4, 64), torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
    weights = torch.randn(2, queries, 4, 64)

    def run(device: str, compute: torch.dtype) -> list[torch.Tensor]:
        sinks = Sinks(4).to(device, compute)
        with torch.no_grad():
            sinks.weight.copy_(torch.tensor([-1.0, 0.0, 1.0, 4.0]))
        inputs = [tensor.to(dtype).to(device, compute).requires_grad_() for tensor in (q, k, v)]
        ids = None if documents is None else Documents(documents.to(device), at_most=8)
        out, _ = CausalAttend(window)(inputs[0], inputs[1], inputs[2], None, ids, sinks.weight)
        gradients = torch.autograd.grad((out * weights.to(device, compute)).sum(), [*inputs, sinks.weight])
        return [tensor.detach().cpu().double() for tensor in (out, *gradients)]

    for ours, expected in zip(run("cuda", dtype), run("cpu", torch.float64), strict=True):
        scale = float(expected.abs().max())
        assert (ours - expected).abs().max() / scale <= (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_loss_and_gradients_equal_the_cpu(name: str, dtype: torch.dtype) -> None:
    tokens, labels = torch.randint(0, 512, (2, 64)), torch.randint(0, 512, (2, 64))

    chosen: dict[int, torch.Tensor] = {}

    def run(device: str, compute: torch.dtype) -> list[torch.Tensor]:
        model = Decoder(preset(name, dropout=0.1)).to(device, compute)
        initialise(model, 0)
        # In bf16 close scores are rounded the other way: a mixture's tokens then go where float64 sent them.
        routing = (
            {layer: experts.to(device) for layer, experts in chosen.items()} if compute == torch.bfloat16 else None
        )
        for layer, router in routers(model):
            router.register_forward_hook(lambda _, __, made, layer=layer: chosen.update({layer: made.chosen_BSK.cpu()}))
        draws = Draws(0, 1, torch.tensor([5, 6], device=device))
        loss = model(tokens.to(device), labels.to(device), 128, draws=draws, routing=routing)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return [tensor.detach().cpu().double() for tensor in (loss, *gradients)]

    exact = run("cpu", torch.float64)
    # Some gradients are mathematically zero (a key bias cannot move a softmax): their noise is judged against the rest.
    floor = max(float(gradient.abs().max()) for gradient in exact[1:]) * (1e-6 if dtype == torch.float64 else 1e-2)
    for ours, expected in zip(run("cuda", dtype), exact, strict=True):
        scale = max(float(expected.abs().max()), floor)
        assert (ours - expected).abs().max() / scale <= (1e-9 if dtype == torch.float64 else 0.1)
