"""Gradients compressed between replicas: nothing is lost for good, all replicas agree, and the bytes are as stated."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.layout import require_layout
from meshwright.parallel import CompressedWeights, build, join_world
from meshwright.parallel.compression import replicas
from meshwright.parallel.compression.codecs import Cast, Int8, TopK
from meshwright.parallel.compression.weights import Reduction
from meshwright.train import Silent, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

SHAPES = {"table": (67, 40), "one": (30, 40), "vector": (40,), "two": (30, 40), "none here": (0, 40)}
"""Odd sizes, a vector, two matrices of one shape, and the empty shard of a rank beyond the last row."""
LOSSY: dict[str, dict[str, Any]] = {
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "topk": {"compress": "topk", "compress_ratio": 0.05},
    "powersgd": {"compress": "powersgd", "compress_rank": 2},
}
lossy = pytest.mark.parametrize("name", LOSSY)


def make_masters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def draw(step: int, rank: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A rank's gradients: some parameters' are a thousand times larger than others', as in a model."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = dict(zip(SHAPES, (1e-3, 1.0, 0.1, 0.01, 1.0), strict=True))
    return {
        name: sizes[name] * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def reduced(
    layout: dict[str, Any], gradients: dict[str, Tensor], reduction: Reduction | None = None
) -> tuple[dict[str, Tensor], Reduction]:
    """The sum over all ranks of some gradients, as this rank has it afterwards."""
    masters = make_masters(next(iter(gradients.values())).dtype)
    if reduction is None:
        assert dist.group.WORLD is not None
        # Small buckets: parameters share some, and the larger ones are spread over several.
        reduction = Reduction(masters, Layout(**{"bucket_mb": 0.005} | layout), dist.group.WORLD)
    for name, master in masters.items():
        master.grad = gradients[name].clone()
    reduction.reduce(masters)
    return {name: master.grad for name, master in masters.items() if master.grad is not None}, reduction


def three_steps(layout: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Sums and memories of this rank after each step."""
    seen, reduction = [], None
    for step in range(3):
        total, reduction = reduced(layout, draw(step, dist.get_rank()), reduction)
        seen.append((total, {name: memory.clone() for name, memory in reduction.memories.items()}))
    return seen


@lossy
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_not_sent_is_remembered_and_replicas_agree_bit_for_bit(name: str, ranks: int) -> None:
    """The decoded sum and all memories add up to the gradients and the memories before, in every step."""
    by_rank = run_ranks(three_steps, ranks, LOSSY[name])
    before = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    left_out = 0.0
    for step in range(3):
        sums = [by_rank[rank][step][0] for rank in range(ranks)]
        memories = [by_rank[rank][step][1] for rank in range(ranks)]
        for parameter in SHAPES:
            assert all(torch.equal(sums[0][parameter], other[parameter]) for other in sums)
            given = before[parameter] + sum(draw(step, rank)[parameter] for rank in range(ranks))
            empty = torch.zeros_like(given)
            before[parameter] = sum((memory.get(parameter, empty) for memory in memories), empty)
            assert torch.allclose(sums[0][parameter] + before[parameter], given, rtol=0, atol=1e-12)
            left_out = max([left_out, *before[parameter].abs().flatten().tolist()])
    assert left_out > 1e-5  # or there was nothing to remember


def exact_and_sum(layout: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A sum with nothing left out, and what it is compared with: products of rank 2 that share their columns."""
    gradients = draw(0, dist.get_rank())
    if layout["compress"] == "powersgd":
        columns = {name: draw(7, 7)[name][:, :2] for name in ("table", "one", "two")}
        gradients |= {name: column @ gradients[name][:2] for name, column in columns.items()}
    exact = {name: gradient.clone() for name, gradient in gradients.items()}
    for gradient in exact.values():
        dist.all_reduce(gradient)
    return exact, reduced(layout, gradients)[0]


@pytest.mark.parametrize(
    "layout", [{"compress": "topk", "compress_ratio": 1.0}, LOSSY["powersgd"]], ids=["topk", "powersgd"]
)
def test_with_room_for_everything_the_sum_is_exact(layout: dict[str, Any]) -> None:
    for exact, total in run_ranks(exact_and_sum, 3, layout):
        for name in SHAPES:
            assert torch.allclose(total[name], exact[name], rtol=0, atol=1e-12), name


def sent_in_a_step(layout: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes this rank counted for a step in float32, those it handed to the network, and the plain ones."""
    handed, n = 0, dist.get_world_size()

    def counted(run: Any, sent_of_given: float) -> Any:
        def collective(*tensors: Tensor, **kwargs: Any) -> Any:
            nonlocal handed
            handed += int(sent_of_given * tensors[-1].numel() * tensors[-1].element_size())
            return run(*tensors, **kwargs)

        return collective

    calls = ((dist, "all_to_all_single", 1 / n), (replicas, "all_gather", 1), (dist, "all_reduce", 2 / n))
    for room, name, share in calls:
        setattr(room, name, counted(getattr(room, name), (n - 1) * share))
    _, reduction = reduced({"bucket_mb": 25.0} | layout, draw(0, dist.get_rank(), torch.float32))
    assert reduction.sent is not None
    return reduction.sent.bytes, handed, reduction.sent.plain_bytes


@pytest.mark.parametrize("ranks", [2, 4])
@lossy
def test_bytes_are_counted_with_indices_and_scales_and_fall_as_stated(name: str, ranks: int) -> None:
    numbers = sum(math.prod(shape) for shape in SHAPES.values())
    padded = -(-numbers // (ranks * 256)) * ranks * 256
    blocks, kept = -(-numbers // 1024), round(0.05 * 1024)
    encoded = {
        "bf16": 2 * padded,
        "fp16": 2 * padded,
        "int8": padded + 4 * padded // 256,
        "topk": blocks * kept * (4 + 2) * ranks / 2,
        "powersgd": 4 * (2 * (67 + 40) + 2 * 2 * (30 + 40) + 40),
    }[name]
    for counted, handed, plain in run_ranks(sent_in_a_step, ranks, LOSSY[name]):
        assert plain == 2 * (ranks - 1) * 4 * numbers // ranks
        assert counted == pytest.approx(2 * (ranks - 1) / ranks * encoded, abs=ranks)
        assert handed == pytest.approx(counted, abs=ranks)


@pytest.mark.parametrize(
    ("codec", "bound"), [(Cast(torch.bfloat16), 2**-8), (Cast(torch.float16), 2**-11), (Int8(), 0.5 / 127)]
)
def test_a_block_is_off_by_less_than_its_steps(codec: Any, bound: float) -> None:
    values = torch.randn(3, codec.block, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [1e4]])
    error = (codec.decode(codec.encode(values), torch.float64) - values).abs() / values.abs().amax(dim=1, keepdim=True)
    assert 0 < error.max() <= bound * 1.001


def test_casts_keep_what_is_too_large_finite_and_zero_blocks_stay_zero() -> None:
    codec = Cast(torch.float16)
    values = torch.tensor([1e6, -1e6, math.inf, math.nan, 1.0, *[0.0] * 251]).view(1, 256)
    decoded = codec.decode(codec.encode(values), torch.float32).flatten()
    assert decoded[:3].tolist() == [65504.0, -65504.0, math.inf] and decoded[3].isnan() and decoded[4] == 1.0
    zeros = torch.zeros(2, 256)
    assert torch.equal(Int8().decode(Int8().encode(zeros), torch.float32), zeros)


def test_topk_keeps_the_largest_of_every_block() -> None:
    values = torch.randn(4, 1024)
    kept = TopK(0.01).decode(TopK(0.01).encode(values), torch.float32)
    for row, original in zip(kept, values, strict=True):
        assert (row != 0).sum() == 10 and torch.equal(row[row != 0], original[row != 0])
        assert original[row == 0].abs().max() <= row[row != 0].abs().min()


def steps_around_a_bad_one(layout: dict[str, Any]) -> list[tuple[dict[str, Tensor], bool]]:
    """Sums of three steps, of which the second is spoilt on one rank, and whether the memories are finite."""
    seen, reduction = [], None
    for step in range(3):
        gradients = draw(step, dist.get_rank())
        if step == 1 and dist.get_rank() == 1:
            gradients["one"][3, 5] = math.inf
        total, reduction = reduced(layout, gradients, reduction)
        states = [*reduction.memories.values(), *reduction.starts.values()]
        seen.append((total, all(bool(state.isfinite().all()) for state in states)))
    return seen


@lossy
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_spoils_one_step_only(name: str) -> None:
    for rank in run_ranks(steps_around_a_bad_one, 2, LOSSY[name]):
        finite = [all(bool(value.isfinite().all()) for value in total.values()) for total, _ in rank]
        assert finite == [True, False, True]
        assert all(memory_finite for _, memory_finite in rank)
        assert rank[2][0]["one"].abs().max() > 0.1


def going_on(layout: dict[str, Any]) -> bool:
    """Whether a second step is the same from memories and starts that were copied into a new reduction."""
    _, first = reduced(layout, draw(0, dist.get_rank()))
    memories = {name: memory.clone() for name, memory in first.memories.items()}
    starts = {name: start.clone() for name, start in first.starts.items()}
    expected, _ = reduced(layout, draw(1, dist.get_rank()), first)
    _, second = reduced(layout, draw(0, dist.get_rank()))
    second.forget()
    forgotten, _ = reduced(layout, draw(1, dist.get_rank()), second)
    for saved, live in ((memories, second.memories), (starts, second.starts)):
        for name, value in saved.items():
            live[name].copy_(value)
    total, _ = reduced(layout, draw(1, dist.get_rank()), second)
    different = any(not torch.equal(forgotten[name], expected[name]) for name in SHAPES)
    return different and all(torch.equal(total[name], expected[name]) for name in SHAPES)


@lossy
def test_memories_and_starts_are_all_that_is_needed_to_go_on(name: str) -> None:
    assert run_ranks(going_on, 2, LOSSY[name]) == [True, True]


def fit(layout: dict[str, Any], forgets: bool) -> float:
    """How far least squares by plain gradient descent, each rank with data of its own, end from the truth."""
    sizes = torch.logspace(0, -2, 64)  # some columns' gradients are a hundred times smaller than others'
    truth = sizes * torch.randn(64, 64, generator=torch.Generator().manual_seed(99))
    data = torch.Generator().manual_seed(dist.get_rank())
    master = nn.Parameter(torch.zeros(64, 64))
    assert dist.group.WORLD is not None
    reduction = Reduction({"weight": master}, Layout(**layout), dist.group.WORLD)
    for _ in range(150):
        x = torch.randn(16, 64, generator=data)
        master.grad = x.T @ (x @ (master.detach() - truth)) / 64
        reduction.reduce({"weight": master})
        if forgets:
            reduction.forget()
        with torch.no_grad():
            master.sub_(0.05 * master.grad)
    return float(((master - truth) / sizes).square().mean())


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [LOSSY["topk"], LOSSY["powersgd"] | {"compress_rank": 4}], ids=["topk", "powersgd"])
def test_training_arrives_with_error_feedback_and_not_without(layout: dict[str, Any]) -> None:
    plain = run_ranks(fit, 4, {"compress": "topk", "compress_ratio": 1.0}, False)[0]
    with_memory, without = (run_ranks(fit, 4, layout, forgets)[0] for forgets in (False, True))
    assert plain < 1e-5 and with_memory < 1e-3, (plain, with_memory)
    assert without > 20 * with_memory


def small_job(**layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 64},
            "data": {"sources": ["builtin:synthetic"], "mask_documents": True, "workers": 0},
            "batch": {"sequence_length": 16, "global_batch": 8, "micro_batch": 1},
            "evaluation": {"every_steps": 0},
            "layout": layout,
            "run": {"steps": 2, "device": "cpu"},
        }
    )


class Rows(Silent):
    """A recorder that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def train(job: Job) -> tuple[list[dict[str, Any]], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """A run's rows, and the shapes of this rank's masters and memories."""
    world, rows = join_world(job, torch.device("cpu")), Rows()
    engine, weights = build(job, world)
    make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, world).run()
    assert isinstance(weights, CompressedWeights)
    shapes = {name: tuple(master.shape) for name, master in weights.masters.items()}
    return rows.rows, shapes, {name: tuple(memory.shape) for name, memory in weights.reduction.memories.items()}


def test_rows_tell_bytes_and_ratio_and_memories_are_as_large_as_a_ranks_shards() -> None:
    layout = {"dp_replicate": 2, "dp_shard": 2, "compress": "int8"}
    for rows, masters, memories in run_ranks(train, 4, small_job(**layout)):
        assert masters == memories
        assert [3.5 < row["compression_ratio"] < 3.94 for row in rows] == [True, True]
        numbers = sum(math.prod(shape) for shape in masters.values())
        assert rows[0]["sent_bytes"] == rows[1]["sent_bytes"] == pytest.approx(numbers * (1 + 4 / 256), rel=0.1)


def test_the_first_steps_may_go_uncompressed() -> None:
    layout = {"dp_replicate": 2, "compress": "int8", "compress_after": 1}
    for rows, _, _ in run_ranks(train, 2, small_job(**layout)):
        assert rows[0]["compression_ratio"] == 1.0 and rows[1]["compression_ratio"] > 3.5


def test_compression_needs_replicas_and_a_loss_scale_that_stays() -> None:
    with pytest.raises(UserError, match=r'layout.compress = "int8" .* layout.dp_replicate = 1; raise it or set'):
        require_layout(small_job(dp_shard=2, compress="int8"), 2)
    fp16 = small_job(dp_replicate=2, compress="int8").model_dump() | {"precision": {"compute": "fp16"}}
    with pytest.raises(UserError, match=r'precision.compute = "fp16" .* set precision.compute = "bf16"'):
        require_layout(Job.model_validate(fp16), 2)
