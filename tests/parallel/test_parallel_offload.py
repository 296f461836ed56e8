"""Offload: the same numbers as without it in every mode, and what really leaves the device."""

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.layout import require_layout
from meshwright.parallel import OffloadedWeights, World, build, join_world, take_traffic
from meshwright.parallel.offload import sharded
from meshwright.parallel.offload.host import host_buffer
from meshwright.torch_private.sharding import parameter_groups
from meshwright.train import build_optimizer, make_trainer
from meshwright.verify import check, shrink
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

MODEL = {
    "vocab_size": 50, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 40,
    "max_sequence_length": 16,
}  # fmt: skip
ALL = ["optimizer", "params", "activations"]
CPU = torch.device("cpu")


def make_job(
    offload: Sequence[str], micro_batch: int = 1, precision: dict[str, str] | None = None, **layout: Any
) -> Job:
    return Job.model_validate(
        {
            "model": MODEL,
            "data": {"sources": ["builtin:synthetic"], "workers": 0, "mask_documents": True},
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": micro_batch},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "evaluation": {"every_steps": 3, "batches": 3, "sample_tokens": 0},
            "schedule": {"warmup_steps": 1},
            "precision": precision or {},
            "memory": {"offload": list(offload)},
            "layout": layout,
            "run": {"steps": 3, "device": "cpu"},
        }
    )


# ---- Parity: the matrix holds more of these; one of each kind is here so that a mistake shows beside its code. ----


@pytest.mark.parametrize("offload", [["optimizer"], ["params"], ["activations"], ALL], ids="+".join)
def test_one_process_computes_the_same(offload: list[str]) -> None:
    assert check(make_job(offload)).ok


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}, {"pp": 2}, {"pp": 2, "schedule": "zb-h1"}],
)
def test_ranks_compute_the_same(layout: dict[str, Any]) -> None:
    assert check(make_job(ALL, **layout)).ok


@pytest.mark.thorough
def test_the_recipe_for_two_small_cards_computes_the_same() -> None:
    job, _ = shrink(load_job("10b-2xrtx3090").job)
    assert set(job.memory.offload) == {"optimizer", "params"} and job.layout.zero == 3
    assert check(job).ok


class Rows:
    """Recorder and progress that keep rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def train(
    job: Job, dtype: torch.dtype | None = None, device: torch.device = CPU
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The rows of a run's steps and its last weights."""
    world = World(device)
    engine, weights = build(job, world, dtype)
    rows = Rows()
    make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, world).run()
    steps = [row for row in rows.rows if "loss" in row]
    return steps, {name: master.detach().cpu().clone() for name, master in weights.masters.items()}


def small(job: Job) -> Job:
    """A job that a CPU without 16-bit arithmetic runs in a second, clipping every step."""
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"layers": 2, "ffn_width": 16}),
            "batch": job.batch.model_copy(update={"sequence_length": 8, "global_batch": 2}),
            "optimizer": job.optimizer.model_copy(update={"clip": 0.1}),
            "evaluation": job.evaluation.model_copy(update={"every_steps": 0}),
        }
    )


@pytest.mark.parametrize("offload", [["optimizer"], ["params", "activations"]], ids="+".join)
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_sixteen_bit_training_is_bit_for_bit_that_without_offload(offload: list[str], gradients: str) -> None:
    precision = {"compute": "bf16", "gradients": gradients}
    here, weights = train(small(make_job([], precision=precision)))
    there, offloaded = train(small(make_job(offload, precision=precision)))
    for field in ("loss", "grad_norm"):
        assert [row[field] for row in here] == [row[field] for row in there]
    for name, master in weights.items():
        assert torch.equal(master, offloaded[name]), name


# ---- What moves and what stays ----


def test_a_step_moves_each_gradient_out_and_each_new_value_in_and_its_row_tells() -> None:
    job = make_job(["optimizer"])
    steps, weights = train(job)
    size = 4 * sum(master.numel() for master in weights.values())
    assert job.accumulation == 4
    for row in steps:
        assert row["offload_to_host_bytes"] == 4 * size
        assert row["offload_to_device_bytes"] == 3 * size + size  # sums so far, to add to them; then new values
        assert row["offload_update_s"] > 0
        assert row["offload_wait_s"] == 0


def test_streamed_parameters_are_moved_for_every_use_of_a_block() -> None:
    job = make_job(["params"])
    engine, weights = build(job, World(CPU))
    blocks = 4 * sum(master.numel() for name, master in weights.masters.items() if name.startswith("layers."))
    [model] = engine.modules
    take_traffic()
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    # Parameters of a block lie at multiples of 64 elements.
    assert take_traffic().to_device_bytes == pytest.approx(blocks, rel=0.05)


def resident(model: nn.Module) -> int:
    """How many blocks have their parameters on the device."""
    return sum(any(p.untyped_storage().size() for p in block.parameters()) for block in model.layers.values())


def test_streamed_blocks_are_on_the_device_only_around_their_use() -> None:
    job = make_job(["params"])
    engine = build(job, World(CPU))[0]
    [model] = engine.modules
    seen: list[int] = []
    for block in model.layers.values():
        block.ffn.register_forward_hook(lambda *args: seen.append(resident(model)))
        block.ffn.register_full_backward_hook(lambda *args: seen.append(resident(model)))
    data = iter(Loader(Stream([RunningWindows(unequal_corpus(job).train, 16)], seed=0), global_batch=4))
    engine.accumulate(next(data), 1)
    assert len(seen) == 2 * 3 * job.accumulation
    assert max(seen) == 2  # the one in use and the next one
    assert resident(model) == 0


def test_an_activation_saved_by_several_operations_moves_once_and_weights_never_do() -> None:
    """Exactly the distinct tensors that plain blocks save move, once out and once back."""
    job = make_job(["activations"], micro_batch=4)
    [plain] = build(make_job([], micro_batch=4), World(CPU))[0].modules
    engine = build(job, World(CPU))[0]
    tokens = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(0))
    weights = {p.untyped_storage().data_ptr() for p in plain.parameters()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor)
        return tensor

    times, expected = 0, 0

    def counting(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal times, expected
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = forward(*args, **kwargs)
            times, expected = times + len(saved), expected + sum({t.data_ptr(): t.nbytes for t in saved}.values())
            saved.clear()
            return result

        return counted

    for block in plain.layers.values():
        block.forward = counting(block.forward)
    plain(tokens, tokens, 64).backward()
    take_traffic()
    engine.modules[0](tokens, tokens, 64).backward()
    moved = take_traffic()
    assert times > 3 * 8 and expected > 0
    assert (moved.to_host_bytes, moved.to_device_bytes) == (expected, expected)


def test_what_a_backward_brought_back_leaves_again() -> None:
    job = make_job(["activations"])
    engine = build(job, World(CPU))[0]
    data = next(iter(Loader(Stream([RunningWindows(unequal_corpus(job).train, 16)], seed=0), global_batch=4)))
    engine.accumulate(data, 1)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "_Kept"]


def shards_on_the_host(job: Job) -> list[dict[str, Any]]:
    world = join_world(job, CPU)
    engine, weights = build(job, world)
    rows = Rows()
    make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, world).run()
    size = sum(4 * master.numel() for master in weights.masters.values())
    groups = [
        g for module in engine.modules[0].modules() if isinstance(module, FSDPModule) for g in parameter_groups(module)
    ]
    told = all(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)
    return [{**row, "shard_bytes": size, "torch_told": told} for row in rows.rows if "loss" in row]


def test_shards_go_to_the_device_for_every_gather_and_gradients_back_for_every_reduction() -> None:
    for rows in run_ranks(shards_on_the_host, 2, make_job(["params"], dp_shard=2, zero=3)):
        last = rows[-1]
        # Two micro-batches, each unit gathered twice in each; torch pads shards that are uneven.
        assert last["torch_told"]
        assert last["offload_to_host_bytes"] == pytest.approx(2 * last["shard_bytes"], rel=0.05)
        assert last["offload_to_device_bytes"] == pytest.approx(4 * last["shard_bytes"], rel=0.1)


def uncounted(job: Job, name: str) -> tuple[list[Any], list[Any], list[str]]:
    """Losses with counters and with broken ones, and what was warned of."""
    counted = [row["loss"] for row in shards_on_the_host(job)]

    def broken(*_: Any) -> Any:
        raise AttributeError("torch has no such name any more")

    setattr(sharded, name, broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = shards_on_the_host(job)
    return counted, [row["loss"] for row in rows], [str(one.message) for one in caught if "counted" in str(one.message)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["is_gathering", "shard_bytes", "parameter_groups"])
def test_counters_that_fail_are_reported_once_and_fail_no_run(name: str) -> None:
    for counted, found, messages in run_ranks(uncounted, 2, make_job(["params"], dp_shard=2, zero=3), name):
        assert found == counted
        [message] = messages
        assert message.endswith("no longer counted (AttributeError: torch has no such name any more)")


def test_an_update_in_many_lots_is_that_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = train(make_job(["optimizer"]), torch.float64)
    monkeypatch.setattr("meshwright.parallel.offload.weights.CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr("meshwright.parallel.offload.weights.STAGED_ELEMENTS", 300)
    _, pieces = train(make_job(["optimizer"]), torch.float64)
    for name, master in whole.items():
        assert torch.equal(master, pieces[name]), name


def test_norms_on_the_host_hold_over_many_entries() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(2000, 10000, device="meta"))
    weights = OffloadedWeights(model, CPU, torch.float32, torch.float32, torch.float32, stream=False)
    gradient = torch.full((2000, 10000), 1e-3)
    model.weight.backward(gradient)
    assert float(weights.square_sum()) == pytest.approx(20.0, rel=1e-5)


def test_a_master_without_a_gradient_stays_as_it_is() -> None:
    model = nn.Module()
    model.used, model.idle = (nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(2))
    weights = OffloadedWeights(model, CPU, torch.float32, torch.float32, torch.float32, stream=False)
    for master in weights.masters.values():
        master.data.fill_(1.0)
    weights.refresh()
    optimizer = build_optimizer(weights.masters, make_job(["optimizer"]))
    model.used.backward(torch.ones(4, 4))
    weights.collect_gradients()
    weights.update(optimizer)
    weights.zero_gradients()
    assert not torch.equal(weights.masters["used"], torch.ones(4, 4))
    assert torch.equal(model.used, weights.masters["used"])
    assert torch.equal(weights.masters["idle"], torch.ones(4, 4))


# ---- What is refused ----


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pp": 2, "schedule": "pipedream"}, "pipedream"),
        ({"dp_replicate": 2, "compress": "bf16"}, "layout.compress"),
    ],
)
def test_combinations_that_cannot_be_are_refused_by_name(layout: dict[str, Any], words: str) -> None:
    micro_batch = 4 if "pp" in layout else 1
    with pytest.raises(UserError, match="memory.offload.*" + words):
        require_layout(make_job(["optimizer"], micro_batch=micro_batch, **layout), 2)


# ---- On a GPU ----


@pytest.mark.gpu
def test_host_buffers_are_page_locked_to_the_byte_and_let_go_of() -> None:
    device = torch.device("cuda")
    for _ in range(3):  # the same addresses again
        buffer = host_buffer(3 * 2**20 + 5, torch.float32, device)
        assert buffer.is_pinned() and buffer.nbytes == 4 * (3 * 2**20 + 5)
        del buffer


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [["optimizer"], ["params"], ["activations"], ALL], ids="+".join)
def test_a_gpu_computes_the_same(offload: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.parallel.offload.activations.SMALL_BYTES", 1)
    device = torch.device("cuda", 0)
    here, weights = train(make_job([]), torch.float64, device)
    there, offloaded = train(make_job(offload), torch.float64, device)
    for field in ("loss", "grad_norm"):
        assert [row[field] for row in there] == pytest.approx([row[field] for row in here], rel=1e-12)
    for name, master in weights.items():
        torch.testing.assert_close(offloaded[name], master, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
def test_masters_and_gradients_take_no_room_on_a_gpu() -> None:
    shape = MODEL | {"width": 512, "heads": 8, "head_dim": 64, "ffn_width": 2048, "layers": 8}
    held = {}
    for offload in ([], [], ["optimizer"], ["params"]):  # the first also pays for what libraries keep
        job = make_job(offload, precision={"compute": "bf16"})
        job = job.model_copy(update={"model": type(job.model).model_validate(shape)})
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine, weights = build(job, World(torch.device("cuda", 0)))
        optimizer = build_optimizer(weights.masters, job)
        data = next(iter(Loader(Stream([RunningWindows(unequal_corpus(job).train, 16)], seed=0), global_batch=4)))
        engine.accumulate(data, 1)
        weights.update(optimizer)
        weights.zero_gradients()
        torch.cuda.synchronize()
        parameters = sum(master.numel() for master in weights.masters.values())
        held["+".join(offload)] = (torch.cuda.memory_allocated() - before) / parameters
        del engine, weights, optimizer
        gc.collect()
    assert held[""] == pytest.approx(14, rel=0.05)  # master 4, working copy 2, states 8
    assert held["optimizer"] == pytest.approx(2, rel=0.2)
    assert held["params"] < 0.5
