"""Compiled without graph breaks, the model computes the same and no step, document or count compiles it anew."""

import pytest
import torch
from model_shapes import preset
from torch._dynamo.testing import CompileCounterWithBackend

from meshwright.model import Decoder, Documents, Draws, initialise


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-gpt2"])
def test_one_graph_serves_every_step(name: str) -> None:
    torch._dynamo.reset()
    model = Decoder(preset(name, layers=1, dropout=0.1)).double()
    initialise(model, 0)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(3):
        torch.manual_seed(step)
        tokens, labels = torch.randint(0, 512, (2, 24)), torch.randint(0, 512, (2, 24))
        inputs = {
            "positions": torch.arange(24).expand(2, 24),
            "documents": Documents(torch.randint(0, 3, (2, 24)).sort(dim=1).values),
            "draws": Draws(0, torch.tensor(step), torch.tensor([2 * step, 2 * step + 1])),
        }
        count = torch.tensor(40 + step)
        loss, expected = compiled(tokens, labels, count, **inputs), model(tokens, labels, count, **inputs)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(of, list(model.parameters())) for of in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert counter.frame_count == 1
