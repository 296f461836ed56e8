"""16-bit gradients: how they are added up, what they save, and that the update is the usual one."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_threads import collect_settled
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import WholeWeights, build, join_world
from meshwright.parallel.shard_index import shard_index_of
from meshwright.parallel.weights import WIDENED_AT_ONCE, make_step, square_sum
from meshwright.train import build_optimizer
from meshwright.verify import observe, run_ranks

# Every dim divides by the ranks, so that torch pads nothing and the count is exact.
MODEL = {
    "vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 64,
    "max_sequence_length": 16, "tied": True,
}  # fmt: skip
SIZES = (1, 16, 300 * 17, 8192, 8208, 100_000)


def make_job(gradients: str = "bf16", compute: str = "bf16", accumulation: int = 2, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": MODEL,
            "data": {"sources": ["builtin:synthetic"], "workers": 0},
            "batch": {"sequence_length": 8, "global_batch": 2 * accumulation, "micro_batch": 1},
            "precision": {"compute": compute, "gradients": gradients},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every_steps": 0},
            "layout": layout,
            "run": {"steps": 3},
        }
    )


def held_bytes(dtype: torch.dtype, but: set[int]) -> int:
    """Bytes of all live tensors of a dtype, but for some storages and what has a few entries."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.dtype == dtype:
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            if storage.nbytes() >= 64 and storage.data_ptr() not in but:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_a_parameter(job: Job) -> dict[str, float]:
    """What a rank holds after its last backward and after an update, by kind."""
    gc.freeze()
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    [model] = engine.modules
    optimizer = build_optimizer(weights.masters, job, weights.shards(), world)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        for last in (False, True):
            weights.start_micro_batch(last)
            model(tokens, tokens, 8).backward()
        weights.collect_gradients()
        collect_settled()
        masters = {p.untyped_storage().data_ptr() for p in weights.masters.values()}
        states = {v.untyped_storage().data_ptr(): v for s in optimizer.state.values() for v in s.values() if v.dim()}
        gradients = [p.grad for p in weights.masters.values() if p.grad is not None]
        counted = {
            "masters": sum(p.nbytes for p in weights.masters.values()),
            "gradients": sum(gradient.nbytes for gradient in gradients),
            "states": sum(state.untyped_storage().nbytes() for state in states.values()),
            "other wide": held_bytes(torch.float32, masters | set(states)),
        }
        weights.update(optimizer)
        weights.zero_gradients()
    parameters = sum(shard.shape[0] * (shard.shape[1] if shard.shape[1:] else 1) for shard in weights.shards().values())
    return {kind: size / parameters for kind, size in counted.items()}


@pytest.mark.parametrize(
    ("layout", "share"), [({}, 1), ({"dp_replicate": 2}, 1), ({"dp_shard": 2}, 2), ({"dp_shard": 2, "zero": 3}, 2)]
)
def test_gradients_take_two_bytes_and_no_wide_copy_stays(layout: dict[str, Any], share: int) -> None:
    job = make_job(**layout)
    for rank in run_ranks(bytes_a_parameter, ranks_of(job.layout), job):
        expected = {"masters": 4 / share, "gradients": 2 / share, "states": 8 / share, "other wide": 0.0}
        assert rank == pytest.approx(expected)


def test_micro_batches_are_added_in_bf16() -> None:
    model = nn.ParameterDict({"a": torch.ones(3)})
    weights = WholeWeights(model, torch.bfloat16, torch.bfloat16)
    for size in (1.0, 2**-9):  # the second is half a step of bf16 at 1
        (model["a"] * size).sum().backward()
    assert weights.masters["a"].grad.dtype == torch.bfloat16 and weights.masters["a"].grad.tolist() == [1.0, 1.0, 1.0]
    assert float(weights.square_sum()) == pytest.approx(3.0, rel=1e-6)  # the norm is not rounded to bf16


@pytest.mark.gpu
def test_a_gpus_norm_is_that_of_float64() -> None:
    """With sizes and addresses that its kernel cannot read by lines, several formats, and shards with copies."""
    torch.manual_seed(0)
    formats = (torch.bfloat16, torch.float32, torch.float16)
    made = [torch.randn(count, device="cuda").to(formats[place % 3]) for place, count in enumerate(SIZES)]
    made.append(torch.randn(4097, device="cuda")[1:])
    masters = {str(place): nn.Parameter(torch.zeros(tensor.shape, device="cuda")) for place, tensor in enumerate(made)}
    for master, gradient in zip(masters.values(), made, strict=True):
        master.grad_dtype = gradient.dtype
        master.grad = gradient
    for copies in (lambda place: 1, lambda place: 1 + place % 2):
        whole = {name: shard_index_of(master, tuple(master.shape)) for name, master in masters.items()}
        shards = {name: replace(index, copies=copies(int(name))) for name, index in whole.items()}
        expected = sum(float(each.double().square().sum()) / copies(place) for place, each in enumerate(made))
        assert float(square_sum(masters, shards)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "pp": 2}], ids=str)
def test_layouts_stay_with_one_device_and_with_wide_gradients(layout: dict[str, Any]) -> None:
    [alone] = run_ranks(observe, 1, make_job(), None)
    [wide] = run_ranks(observe, 1, make_job("fp32"), None)
    assert alone.losses != wide.losses and alone.losses == pytest.approx(wide.losses, rel=3e-3)
    job = make_job(**layout)
    for rank in run_ranks(observe, ranks_of(job.layout), job, None):
        assert rank.losses == pytest.approx(alone.losses, rel=2e-3)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-2)


def test_an_update_by_parts_is_the_update() -> None:
    count = 2 * WIDENED_AT_ONCE + 3

    def masters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(3, generator=generator)) for _ in range(count)]

    narrow, wide = masters(), masters()
    optimizers = [torch.optim.AdamW(params, lr=0.1, fused=True) for params in (narrow, wide)]
    for step in range(3):
        for ours, theirs in zip(narrow[step:], wide[step:], strict=True):  # some have no gradient
            gradient = torch.randn(3).bfloat16()
            ours.grad_dtype = torch.bfloat16
            ours.grad, theirs.grad = gradient, gradient.float()
        make_step(optimizers[0], narrow)
        make_step(optimizers[1], wide)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(narrow, wide, strict=True))
        assert all(ours.grad is None for ours in narrow)
        optimizers[1].zero_grad()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"compute": "fp32"}, r'but precision.compute = "fp32" computes them in 32; set precision.compute = "bf16"'),
        ({"dp_replicate": 2, "compress": "topk"}, r'layout.compress = "topk" keeps exact until it is sent'),
        ({"pp": 2, "schedule": "pipedream", "accumulation": 1}, r'saves nothing with layout.schedule = "pipedream"'),
    ],
)
def test_impossible_combinations_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    job = make_job(**fields)
    untied = job.model.model_copy(update={"tied": False})
    batch = job.batch.model_copy(update={"micro_batch": job.batch.global_batch // job.data_parallel})
    job = job.model_copy(update={"model": untied, "batch": batch})
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(job, ranks_of(job.layout))
    assert "\n" not in str(caught.value)


def test_fp16_and_offloaded_shards_are_refused_where_they_cannot_work() -> None:
    pipedream: dict[str, Any] = {"pp": 2, "schedule": "pipedream", "accumulation": 1}
    job = make_job("fp32", "fp16", **pipedream)
    untied = job.model.model_copy(update={"tied": False})
    batch = job.batch.model_copy(update={"micro_batch": 2})
    with pytest.raises(
        UserError, match=r'"fp16" skips a step that overflows on all ranks or none.*set precision.compute'
    ):
        require_layout(job.model_copy(update={"model": untied, "batch": batch}), 2)
    job = make_job(dp_shard=2)
    offloading = job.model_copy(update={"memory": job.memory.model_copy(update={"offload": ("optimizer",)})})
    with pytest.raises(UserError, match=r'memory.offload = \["optimizer"\].*set precision.gradients = "fp32"'):
        require_layout(offloading, 2)
