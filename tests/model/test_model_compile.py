"""Compiled without graph breaks, the model computes the same and no step, document or count compiles it anew."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_shapes import preset
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import meshwright
from meshwright.model import Decoder, Documents, Draws, initialise
from meshwright.model.block import Block
from meshwright.model.rotary import rotary_tables


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


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_block_keeps_no_result_of_swiglu_and_values_alone(dtype: torch.dtype) -> None:
    """Counted in D numbers a token: x, both normed inputs, the stream after attention, q, the attention's result,
    k, v and its softmax's sums; gate and up."""
    torch._dynamo.reset()
    shape = preset("tiny-llama", width=64, heads=4, kv_heads=2, head_dim=16, ffn_width=256)
    block, sequence = Block(shape, 0).to(dtype), 509  # prime: no weight has as many numbers
    block.attention.fused = block.ffn.fused = True
    x = torch.randn(2, sequence, 64, dtype=dtype, requires_grad=True)
    tables = rotary_tables(shape, torch.arange(sequence).unsqueeze(0), dtype)
    compiled = torch.compile(block, backend="aot_eager_decomp_partition")
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.numel() % (2 * sequence) == 0:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    compiled(x, tables)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = compiled(x, tables)
    assert out.requires_grad
    assert 15 < sum(kept.values()) / x.nbytes < 15.5


NOTHING_CHANGED = {"to", "contiguous", "float", "double", "type_as", "type"}


def own_forwards() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The forward of every autograd function of ours, under its file and name."""
    for file in Path(meshwright.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(part, ast.ClassDef) and "autograd.Function" in ast.unparse(part).split("):")[0]:
                [forward] = [one for one in part.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
                yield f"{file.name}: {part.name}", forward


@pytest.mark.thorough
def test_no_function_ends_its_forward_with_a_conversion() -> None:
    """If such a conversion changes nothing, torch 2.11's compiler gives zero gradients, without a word."""
    found = []
    for name, forward in own_forwards():
        for ends in [one.value for one in ast.walk(forward) if isinstance(one, ast.Return)]:
            for value in ends.elts if isinstance(ends, ast.Tuple) else [ends]:
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                    found += [name] * (value.func.attr in NOTHING_CHANGED)
    assert found == ["norm.py: _RMSNorm"]  # which the compiler never sees


@pytest.mark.thorough
def test_functions_with_a_starred_parameter_keep_their_context_without_gradients() -> None:
    """Else torch's compiler fails, or leaves a block uncompiled, in evaluations."""
    starred = {name: forward for name, forward in own_forwards() if forward.args.vararg is not None}
    marked = [name for name, forward in starred.items() if "takes_context" in map(ast.unparse, forward.decorator_list)]
    assert len(starred) > 5 and marked == list(starred)
