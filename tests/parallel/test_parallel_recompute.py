"""Recomputation in layouts: what a rank holds, sends and runs again is what is stated; budgets are met exactly."""

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import counted_calls
from gloo_threads import collect_settled
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cost import MODES, Mode
from meshwright.data import Loader, RunningWindows, Stream
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.layout import (
    budget_span,
    holdings_of_rank,
    ranks_of,
    recompute_modes,
    require_layout,
    stages_of_rank,
    table_of,
)
from meshwright.layout import rules as layout
from meshwright.layout.budget import ORDER, BlockBytes, Counts, StageBytes, cheapest, least_bytes, peak_bytes, work
from meshwright.model import Decoder, Draws, initialise
from meshwright.parallel import build, join_world
from meshwright.parallel.recompute import _recomputing, _selective_contexts, apply_recompute
from meshwright.verify import check, run_ranks, shrink
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import RankError

MODEL = {
    "vocab_size": 32, "width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 48,
    "max_sequence_length": 32,
}  # fmt: skip
GPT2 = {
    "norm": "layernorm", "activation": "gelu", "positions": "learned", "qkv_bias": True, "linear_bias": True,
    "kv_heads": 4, "dropout": 0.1,
}  # fmt: skip
GIB = 2**30


def make_job(
    recompute: Any = "none", *, micro_batches: int = 4, model: dict[str, Any] | None = None, **layout: Any
) -> Job:
    return Job.model_validate(
        {
            "model": MODEL | (model or {}),
            "batch": {"sequence_length": 32, "global_batch": micro_batches, "micro_batch": 1},
            "data": {"sources": ["builtin:synthetic"], "mask_documents": False},
            "evaluation": {"every_steps": 0},
            "precision": {"compute": "fp32"},
            "run": {"steps": 1},
            "memory": {"recompute": recompute},
            "layout": layout,
        }
    )


def table_or_none(job: Job) -> Any:
    return table_of(job) if job.layout.pp > 1 else None


class Living(TorchDispatchMode):
    """The bytes of this rank's tensors that were made under it and still live, but for a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.records = True
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out) if self.records else ():
            for storage in _storages(tensor):
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def nbytes(self, but: list[Tensor]) -> int:
        """Without those of some tensors."""
        left_out = {storage._cdata for tensor in but for storage in _storages(tensor)}
        living = [(key, size) for key, (made, size) in self._made.items() if not made.expired()]
        return sum(size for key, size in living if size > 16 and key not in left_out)


def _storages(tensor: Any) -> list[Any]:
    if isinstance(tensor, DTensor):
        return _storages(tensor._local_tensor)
    if hasattr(tensor, "elem"):  # a collective under way
        return _storages(tensor.elem)
    return [tensor.untyped_storage()] if isinstance(tensor, Tensor) else []


def held_after_forward(jobs: list[Job]) -> list[int]:
    """Bytes a rank holds between forward and backward of a micro-batch, for each job of one layout."""
    world = join_world(jobs[0], torch.device("cpu"))
    held = []
    for job in jobs:
        engine, weights = build(job, world)
        [model] = engine.modules
        tokens = torch.zeros(1, job.batch.sequence_length // job.layout.cp, dtype=torch.int64)
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        draws = Draws(0, 0, torch.arange(1), _drawn_places(job))
        with Living() as living:
            loss = model(tokens, tokens, 16, positions=positions, draws=draws)
        collect_settled()
        known = [*model.parameters(), *weights.masters.values(), tokens, positions, draws.places]
        held.append(living.nbytes([tensor for tensor in known if tensor is not None]))
        loss.backward()
    return held


def _drawn_places(job: Job) -> Tensor | None:
    """Which tokens of the sequence a rank drops from; any will do for a count."""
    shares = job.layout.cp * (job.layout.tp if job.layout.sp else 1)
    return torch.arange(job.batch.sequence_length // shares)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sp": False},
    "tp, heads normed, dropout": {"tp": 2, "model": {"qk_norm": True, "dropout": 0.1, "tied": True}},
    "tp, layernorm, dropout, no sp": {"tp": 2, "sp": False, "model": GPT2},
    "ring": {"cp": 2},
    "allgather": {"cp": 2, "cp_method": "allgather"},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
    "ulysses, one key-value head": {"cp": 2, "cp_method": "ulysses", "model": {"kv_heads": 1}},
    "tp and cp": {"tp": 2, "cp": 2},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_what_is_stated(name: str) -> None:
    jobs = {mode: make_job(mode, **LAYOUTS[name]) for mode in MODES}
    stated = []
    for mode, job in jobs.items():
        [(_, stage)] = stages_of_rank(job, None, 0)
        counts = tuple(stage.blocks if each == mode else 0 for each in ORDER)
        given = 32 * 8 // job.layout.cp * (2 if job.model.positions == "learned" else 1)  # tokens and positions
        stated.append(stage.kept(counts) - given)  # type: ignore[arg-type]
    stated.append(stage.kept((2, 0, 0)) - given)  # of two segments, as of two fully recomputed blocks: their inputs
    segments = make_job({"segments": 3}, **LAYOUTS[name])
    for held in run_ranks(held_after_forward, ranks_of(job.layout), [*jobs.values(), segments]):
        assert held == stated


def messages_of_a_step(jobs: list[Job]) -> list[int]:
    """How often a rank's ring sends in one micro-batch's forward and backward, for each job."""
    world = join_world(jobs[0], torch.device("cpu"))
    send, sent = dist.batch_isend_irecv, [0]

    def counting(operations: Any) -> Any:
        sent[-1] += 1
        return send(operations)

    vars(dist)["batch_isend_irecv"] = counting
    for job in jobs:
        engine, _ = build(job, world)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        engine.modules[0](tokens, tokens, 16).backward()
        sent.append(0)
    return sent[:-1]


@pytest.mark.thorough
def test_a_ring_whose_result_is_kept_is_not_run_again() -> None:
    """Forward sends keys once, backward sends keys and their gradients; full recomputation repeats the forward."""
    layers = MODEL["layers"]
    for sent in run_ranks(messages_of_a_step, 2, [make_job(mode, cp=2) for mode in MODES]):
        assert sent == [3 * layers, 3 * layers, 4 * layers]


def forwards_of_a_block(job: Job) -> list[int]:
    """How often each of a rank's blocks runs in a step, micro-batches apart."""
    world = join_world(job, torch.device("cpu"))
    engine, _ = build(job, world)
    runs: Counter[int] = Counter()
    blocks = [block for module in engine.modules for block in module.layers.values()]
    for place, block in enumerate(blocks):
        block.attention.register_forward_pre_hook(lambda *_, place=place: runs.update([place]))
    data = iter(
        Loader(Stream([RunningWindows(unequal_corpus(job).train, 32)], seed=0), global_batch=job.batch.global_batch)
    )
    engine.accumulate(next(data), 1)
    return [runs[place] // job.accumulation for place in range(len(blocks))]


@pytest.mark.parametrize("recompute", ["full", {"segments": 2}])
@pytest.mark.parametrize(("schedule", "last_stage"), [("1f1b", 2), ("zb-h1", 3)])
def test_a_split_backward_recomputes_in_both_halves(schedule: str, last_stage: int, recompute: Any) -> None:
    """Once in each half; a first stage has no input to give a gradient to, and its whole backward is one."""
    job = make_job(recompute, pp=2, split=[2, 2], schedule=schedule)
    assert run_ranks(forwards_of_a_block, 2, job) == [[2, 2], [last_stage, last_stage]]


def test_selective_with_a_split_backward_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the refusal: when this fails, torch has learned it and the refusal can go."""
    monkeypatch.setattr(layout, "require_recompute", lambda *_: None)
    with pytest.raises(RankError, match="backward an extra time"):
        check(make_job("selective", pp=2, schedule="zb-h1"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recompute", "given"),
    [
        ("selective", {}),
        ({"every": 3}, {"dp_shard": 2, "zero": 3}),
        ({"budget_gib": 120e3 / GIB}, {"tp": 2}),
        ({"budget_gib": 240e3 / GIB}, {"pp": 2}),
        ({"budget_gib": 220e3 / GIB}, {"pp": 2, "schedule": "zb-h1"}),
    ],
)
def test_gradients_are_those_of_one_process(recompute: Any, given: dict[str, Any]) -> None:
    job = make_job(recompute, **given)
    chosen = {mode for rank in range(job.layout.pp) for mode in recompute_modes(job, table_or_none(job), rank).values()}
    assert len(chosen) > 1 or recompute == "selective"
    assert check(job).ok


@pytest.mark.thorough
def test_compiled_blocks_recompute_as_eager_ones_do() -> None:
    """One graph for each mode serves all its blocks and steps."""
    modes: dict[int, Mode] = {0: "full", 1: "full", 2: "selective", 3: "selective"}
    seen = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Decoder(make_job(model={"dropout": 0.1}).model).double()
        initialise(model, 0)
        apply_recompute(model, modes, keep_last=True)
        counter = CompileCounterWithBackend("aot_eager")
        for block in model.layers.values() if compiled else ():
            block.compile(backend=counter, fullgraph=True)
        tokens = torch.arange(16).unsqueeze(0)
        for step in range(2):
            loss = model(tokens, tokens, 16, draws=Draws(0, torch.tensor(step), torch.arange(1)))
            loss.backward()
        seen.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*seen, rtol=1e-12, atol=1e-15)
    assert counter.frame_count == 2


# ---- Budgets ----

BLOCK: dict[Mode, BlockBytes] = {
    "none": BlockBytes(100),
    "selective": BlockBytes(57, 60, 0),
    "full": BlockBytes(7, 93, 1000),
}


def brute_force(stage: StageBytes, holdings: list[tuple[int]], budget: int) -> tuple[int, int] | None:
    """The least work of all ways to give each block any mode, in any order, found by trying them."""
    found = []
    for modes in product(stage.modes, repeat=stage.blocks):
        kept = [stage.modes[mode].kept for mode in modes]
        moments = [0] + [sum(kept[: place + 1]) + stage.modes[mode].remade for place, mode in enumerate(modes)]
        [(held,)] = holdings
        others = (held - 1) * (stage.fixed + sum(kept))
        if others + stage.fixed + max(sum(kept), *moments) <= budget:
            blocks = [stage.modes[mode] for mode in modes]
            found.append((sum(block.flops for block in blocks), sum(block.remade for block in blocks)))
    return min(found, default=None)


@pytest.mark.parametrize("allowed", [("none", "selective", "full"), ("none", "full")])
@pytest.mark.parametrize("held", [1, 3])
def test_the_choice_is_the_one_found_by_trying_all(held: int, allowed: tuple[Mode, ...]) -> None:
    stage, holdings = StageBytes(6, {mode: BLOCK[mode] for mode in allowed}, fixed=11), [(held,)]
    least = least_bytes([stage], holdings)
    for budget in range(least - 3, held * 620, 17):
        way = cheapest([stage], holdings, budget)
        assert (None if way is None else work([stage], way)) == brute_force(stage, holdings, budget), budget
        assert (way is None) == (budget < least)


def test_stages_of_a_rank_share_evenly_and_fullest_first() -> None:
    stages = [StageBytes(4, BLOCK), StageBytes(4, BLOCK)]
    way = cheapest(stages, [(3, 5), (4, 2)], 8 * 57 * 4 - 60)
    assert way is not None and peak_bytes(stages, way, [(3, 5), (4, 2)]) <= 8 * 57 * 4 - 60
    recomputed = [sum(counts[:2]) for counts in way]
    assert recomputed[1] - recomputed[0] in (0, 1)


def peak_of_a_step(job: Job) -> int:
    """Most bytes of activations alive after the forward, or when a block's forward has just been run again."""
    model = Decoder(job.model)
    initialise(model, 0)
    parameters: list[torch.Tensor] = list(model.parameters())
    peaks, living = list[int](), Living()

    def watched(forward: Any) -> Any:
        def run(*args: Any) -> Any:
            again, living.records = not living.records, True
            try:
                return forward(*args)
            finally:  # a forward run again ends with an exception, once it has made what is missing
                living.records = not again
                if again:
                    peaks.append(living.nbytes(parameters))

        return run

    for block in model.layers.values():
        block.forward = watched(block.forward)
    apply_recompute(model, recompute_modes(job, None, 0), keep_last=False)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    with living:
        loss = model(tokens, tokens, 32)
        peaks.append(living.nbytes(parameters))
        living.records = False  # gradients are no activations
        loss.backward()
    return max(peaks)


def test_a_budget_is_kept() -> None:
    """And used: what is held is what was stated, or a little less where gradients have set something free already."""
    least, most = budget_span(make_job(), None)
    [(_, stage)] = stages_of_rank(make_job(), None, 0)
    chosen = set()
    for budget in range(least, most + 1, (most - least) // 7):
        job = make_job({"budget_gib": budget / GIB})
        modes = list(recompute_modes(job, None, 0).values())
        counts: Counts = (modes.count("full"), modes.count("selective"), modes.count("none"))
        stated = peak_bytes([stage], [counts], [(1,)])
        assert 0.8 * stated < peak_of_a_step(job) <= stated <= budget
        chosen.add(counts)
    assert len(chosen) > 4


def test_each_rank_of_a_pipeline_meets_the_budget_with_what_it_holds() -> None:
    """The first rank of 1F1B holds most micro-batches, and so recomputes most."""
    job = make_job({"budget_gib": 150e3 / GIB}, pp=2, split=[2, 2])
    table = table_of(job)
    assert [holdings_of_rank(table, rank) for rank in (0, 1)] == [[(2,)], [(1,)]]
    first, last = (recompute_modes(job, table, rank) for rank in (0, 1))
    assert list(first) == [0, 1] and list(last) == [2, 3]
    assert set(last.values()) == {"none"} and first[0] != "none"


def test_a_budget_is_met_with_few_calls_for_large_models() -> None:
    job = load_job("pretrain-1b", ["memory.recompute={budget_gib=20}", "batch.global_batch=16", "batch.micro_batch=16"])
    with counted_calls() as calls:
        modes = recompute_modes(job.job, None, 0)
    assert calls.count < 100_000, calls
    assert list(modes.values()) == ["full"] * 12 + ["selective"] * 3 + ["none"]


def test_verify_keeps_a_budgets_share() -> None:
    job = load_job("pretrain-1b", ["memory.recompute={budget_gib=12}"]).job
    small, notes = shrink(job)
    require_layout(small, 1)
    assert set(recompute_modes(small, None, 0).values()) != {"none"}
    assert any("memory.recompute" in note.text for note in notes)


@pytest.mark.parametrize(
    ("recompute", "given", "sentence"),
    [
        ({"budget_gib": 1e-6}, {}, r"budget_gib = 1e-06\} is less than .* set budget_gib to at least 7.46e-05$"),
        (
            "selective",
            {"pp": 2, "schedule": "zb-h1"},
            r'keeps its results for one backward, but .*"zb-h1" splits it into',
        ),
        ("full", {"pp": 2, "schedule": "pipedream", "micro_batches": 1}, "newer weights than they first used"),
        ({"budget_gib": 1}, {"model": {"file": "own.py"}}, "model.file = own.py does not say"),
    ],
)
def test_what_cannot_be_recomputed_is_one_sentence(recompute: Any, given: dict[str, Any], sentence: str) -> None:
    job = make_job(recompute, **given)
    with pytest.raises(UserError, match=sentence) as caught:
        require_layout(job, ranks_of(job.layout))
    assert "\n" not in str(caught.value)


def test_the_least_budget_named_is_enough() -> None:
    with pytest.raises(UserError) as caught:
        require_layout(make_job({"budget_gib": 1e-6}), 1)
    named = float(str(caught.value).split("at least ")[1].split()[0])
    require_layout(make_job({"budget_gib": named}), 1)
    with pytest.raises(UserError):
        require_layout(make_job({"budget_gib": 0.98 * named}), 1)


class ProductInReusedMemory(torch.autograd.Function):
    """As compiled code computes a product: into memory that it uses again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        memory = torch.empty(len(x), weight.shape[1])
        torch.mm(x, weight, out=memory)
        result = 2 * memory
        memory.zero_()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0] @ ctx.saved_tensors[0].T, None


def test_products_in_memory_that_is_used_again_are_recomputed() -> None:
    weight = torch.randn(3, 3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return ProductInReusedMemory.apply(x.sin(), weight).sin()

    gradients = []
    for run in (forward, _recomputing(forward, {"context_fn": partial(_selective_contexts, 0, ())})):
        x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
