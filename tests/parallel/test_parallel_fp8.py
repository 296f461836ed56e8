"""fp8 products: their arithmetic against a sequential reference, eager and compiled, whole and in pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout
from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.model.fused import fused_projections
from meshwright.parallel import World, build
from meshwright.parallel.fp8 import Fp8Linear, fp8_linear, quantise, use_fp8
from meshwright.verify import observe, run_ranks

MODEL = {
    "vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 64,
    "max_sequence_length": 16,
}  # fmt: skip


def make_job(compute: str = "fp8", *, model: dict[str, Any] | None = None, micro_batch: int = 1, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": MODEL | (model or {}),
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": 2, "micro_batch": micro_batch},
            "precision": {"compute": compute},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "layout": layout,
            "run": {"steps": 2},
        }
    )


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What x stands for once it was written in fp8 with one scale, as float64."""
    scale = (x.abs().max().float() / torch.finfo(dtype).max).double()
    return (x.double() / scale).to(dtype).double() * scale


def sequential_reference(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Result and gradients of a linear whose operands are rounded to fp8 and whose sums are exact."""
    x_q, weight_q = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
    grad_q = rounded(grad, torch.float8_e5m2)
    return x_q @ weight_q.t(), grad_q @ weight_q, grad_q.flatten(0, -2).t() @ x_q.flatten(0, -2)


def operands(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes, sizes = ((2, 16, 64), (48, 64), (2, 16, 48)), (3.0, 0.02, 1e-7)  # gradients are far below fp8's range
    made = (torch.randn(shape, generator=generator) * size for shape, size in zip(shapes, sizes, strict=True))
    x, weight, grad = (tensor.to(device, dtype) for tensor in made)
    return x.requires_grad_(), weight.requires_grad_(), grad


def run(function: Any, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = function(x, weight)
    out.backward(grad)
    assert x.grad is not None and weight.grad is not None
    results = out.detach(), x.grad, weight.grad
    x.grad = weight.grad = None
    return results


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).abs().max() / expected.abs().max())


def test_result_and_gradients_are_those_of_the_sequential_reference() -> None:
    x, weight, grad = operands()
    seen = run(fp8_linear, x, weight, grad)
    expected = sequential_reference(x.detach(), weight.detach(), grad)
    exact = x.detach().double() @ weight.detach().double().t(), grad.double() @ weight.detach().double()
    for value, reference in zip(seen, expected, strict=True):
        assert value.dtype == torch.bfloat16
        assert distance(value, reference) < 2**-8  # the result's own rounding
    # The reference itself is far from products without fp8, so agreeing with it says something.
    assert distance(expected[0], exact[0]) > 2**-7 and distance(expected[1], exact[1]) > 2**-7


def test_one_scale_puts_the_largest_entry_at_the_formats_largest() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for size in (1e-30, 1.0, 1e30):
            q, scale = quantise(torch.tensor([-3.0, 0.7, 0.0]) * size, dtype)
            assert float(q.float().abs().max()) == torch.finfo(dtype).max
            assert float(q[0].float() * scale) == pytest.approx(-3.0 * size, rel=1e-6)
        zeros, scale = quantise(torch.zeros(3), dtype)
        assert zeros.float().tolist() == [0, 0, 0] and scale > 0
    for bad in (float("inf"), float("nan")):
        x, weight, _ = operands()
        out = fp8_linear(x.detach().index_fill(2, torch.tensor([1]), bad), weight)
        assert not out.isfinite().any()  # a bad step must show


def test_compiled_gradients_are_the_eager_ones() -> None:
    x, weight, grad = operands()
    eager = run(fp8_linear, x, weight, grad)
    compiled = run(torch.compile(fp8_linear, backend="aot_eager", fullgraph=True), x, weight, grad)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs) and theirs.any()


@pytest.mark.thorough
def test_compiled_blocks_have_the_eager_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    tokens, seen = torch.arange(16).unsqueeze(0), []
    for compiled in (False, True):
        job = make_job()
        job = job.model_copy(update={"run": job.run.model_copy(update={"compile": compiled})})
        engine, weights = build(job, World(torch.device("cpu")))
        for module in engine.modules[0].modules():
            if isinstance(module, Attention | FeedForward):
                module.fused = True  # as compiled: projections of one input share a scale
        engine.modules[0](tokens, tokens, 16).backward()
        seen.append({name: master.grad for name, master in weights.masters.items()})
    for name, eager in seen[0].items():
        # The compiler has another RMSNorm, whose results fp8 may round to a neighbour.
        assert float((seen[1][name] - eager).norm() / eager.norm()) < 0.1, name


def test_linears_of_the_blocks_change_and_nothing_else() -> None:
    world = World(torch.device("cpu"))
    (engine, weights), (plain, _) = build(make_job(), world), build(make_job("bf16"), world)
    [model], [other] = engine.modules, plain.modules
    changed = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    projections = ("attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down")
    assert changed == {f"layers.{layer}.{name}" for layer in range(2) for name in projections}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(master.dtype == torch.float32 for master in weights.masters.values())
    [exact] = build(make_job(), world, torch.float64)[0].modules  # a check in another format is one without fp8
    assert not any(isinstance(module, Fp8Linear) for module in exact.modules())


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_layouts_that_cut_no_matrix_compute_what_one_process_does(layout: dict[str, Any]) -> None:
    """With the same micro-batches every scale is the same, and what is left is the order of sums in fp32."""
    job = make_job(**layout)
    [alone] = run_ranks(observe, 1, make_job(), None)
    for rank in run_ranks(observe, ranks_of(job.layout), job, None):
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-5)


def pieces_against_one_process() -> list[float]:
    """Distances of a tensor-parallel pair of linears, and one whole on every rank, from the same pieces in turn."""
    mesh = init_device_mesh("cpu", (2,))
    x, up, _ = operands()
    down = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()

    def on_ranks(placement_up: Any, placement_down: Any) -> list[Tensor]:
        given = DTensor.from_local(x.detach(), mesh, [Replicate()]).requires_grad_()
        weights = [distribute_tensor(up.detach(), mesh, [placement_up]).requires_grad_()]
        weights += [distribute_tensor(down.detach(), mesh, [placement_down]).requires_grad_()]
        out = fp8_linear(fp8_linear(given, weights[0]), weights[1]).redistribute(placements=[Replicate()])
        out.backward(DTensor.from_local(x.detach(), mesh, [Replicate()]))
        grads = [given.grad, *(weight.grad for weight in weights)]
        return [out.to_local().detach(), *(grad.full_tensor() for grad in grads)]

    def in_turn(parts: int) -> list[Tensor]:
        given = x.detach().requires_grad_()
        ups = [part.detach().requires_grad_() for part in up.chunk(parts)]
        downs = [part.detach().requires_grad_() for part in down.chunk(parts, dim=1)]
        halves = [fp8_linear(fp8_linear(given, a), b) for a, b in zip(ups, downs, strict=True)]
        out = torch.stack(halves).sum(0)
        out.backward(x.detach())
        return [out.detach(), given.grad, torch.cat([a.grad for a in ups]), torch.cat([b.grad for b in downs], 1)]

    cut = zip(on_ranks(Shard(0), Shard(1)), in_turn(2), strict=True)
    whole = zip(on_ranks(Replicate(), Replicate()), in_turn(1), strict=True)
    return [distance(ours, theirs.double()) for ours, theirs in [*cut, *whole]]


def test_tensor_parallel_pieces_are_scaled_each_on_its_own() -> None:
    for distances in run_ranks(pieces_against_one_process, 2):
        assert max(distances) < 2**-7, distances  # the partial sums are added in bf16


@pytest.mark.thorough
def test_a_tensor_parallel_model_stays_with_the_one_process_model() -> None:
    [alone] = run_ranks(observe, 1, make_job("bf16"), None)
    for rank in run_ranks(observe, 2, make_job(tp=2, model={"kv_heads": 1}, kv_replicate=True), None):
        assert all(0.0 < loss < 10.0 for loss in rank.losses)
    for rank in run_ranks(observe, 2, make_job(tp=2), None):
        assert rank.losses == pytest.approx(alone.losses, rel=0.02)
        assert rank.norms == pytest.approx(alone.norms, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"model": {"width": 40}},
            r'"fp8" needs.*multiples of 16, but model.width = 40 is not; change it or set',
        ),
        ({"model": {"ffn_width": 48}, "tp": 2}, r"model.ffn_width = 48, 24 on a rank, is not"),
        ({"model": {"kv_heads": 1, "head_dim": 8}}, r"model.kv_heads × model.head_dim = 8 is not"),
        ({"cp": 2}, r"batch.micro_batch × batch.sequence_length = 16, 8 on a rank, is not"),
    ],
)
def test_sides_that_fp8_cannot_multiply_are_refused(fields: dict[str, Any], sentence: str) -> None:
    job = make_job(**fields)
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(job, ranks_of(job.layout))
    assert "\n" not in str(caught.value)


def test_a_users_own_linear_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match=r'"layers.0.gate" is 48 × 20; widen it or set precision.compute = "bf16"'):
        use_fp8(nn.ModuleDict({"0": nn.ModuleDict({"gate": nn.Linear(20, 48)})}))


@pytest.mark.gpu
def test_on_a_gpu_eager_and_compiled_follow_the_reference() -> None:
    x, weight, grad = operands("cuda")
    with torch.no_grad():  # scales that are powers of two: however a device divides, the same numbers round up
        x[0, 0, 0], weight[0, 0], grad[0, 0, 0] = 448 / 16, 448 / 2**12, 57344 / 2**36
    expected = sequential_reference(x.detach().cpu(), weight.detach().cpu(), grad.cpu())
    for function in (fp8_linear, torch.compile(fp8_linear, fullgraph=True)):
        for value, reference in zip(run(function, x, weight, grad), expected, strict=True):
            assert distance(value.cpu(), reference) < 2**-7


def test_projections_made_together_are_one_fp8_product() -> None:
    x, weight, _ = operands()
    apart = [Fp8Linear(64, rows, bias=False, dtype=torch.bfloat16) for rows in (32, 16)]
    with torch.no_grad():
        for linear, part in zip(apart, weight.split([32, 16]), strict=True):
            linear.weight.copy_(part)
    seen = torch.cat(list(fused_projections(x, apart)), dim=-1)
    assert torch.equal(seen, fp8_linear(x, weight))
