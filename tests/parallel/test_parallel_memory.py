"""What the ZeRO dial really holds, counted: every live tensor of a rank by kind, against the documented row.

P parameters, d shards; bytes with a bf16 working copy and fp32 master, gradients and AdamW states:
zero 0: 18P · zero 1: 2P + 4P·[accumulation > 1] + 16P/d · zero 2: 2P + 16P/d · zero 3: 16P/d + gathered units.
Where gradients are reduced every micro-batch, torch keeps the last unit's unreduced gradient until the next reduction.
"""

import gc
from collections.abc import Callable
from math import prod

import pytest
import torch
from gloo_threads import collect_settled

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.job import Job
from meshwright.parallel import build, join_world
from meshwright.pipeline import Action
from meshwright.train import build_optimizer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

# Every dim divides by the ranks, so that torch pads nothing and the count is exact; vectors are few.
MODEL = {
    "vocab_size": 64, "width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 64,
    "max_sequence_length": 16,
}  # fmt: skip


def make_job(accumulation: int, **layout: int) -> Job:
    return Job.model_validate(
        {
            "model": MODEL,
            "batch": {"sequence_length": 8, "global_batch": 2 * accumulation, "micro_batch": 1},
            "precision": {"compute": "bf16"},
            "layout": layout,
        }
    )


def storages(dtype: torch.dtype, but: set[int]) -> dict[int, int]:
    """Live storages of a dtype with their sizes, but for some."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu" and thing.dtype == dtype:
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in but:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def census(job: Job) -> dict[str, int]:
    """The most bytes of each kind a rank holds between the passes of its second step (the first allocates states)."""
    gc.freeze()  # what was there before the rank is not looked at
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    [model] = engine.modules
    optimizer = build_optimizer(weights.masters, job)
    masters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in weights.masters.values()}
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    most = {"masters": sum(masters.values()), "working": 0, "gradients": 0, "states": 0}

    def look() -> None:
        collect_settled()
        states = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for state in optimizer.state.values()
            for value in state.values()
            if value.dim()
        }
        rest = storages(torch.float32, set(masters) | set(states))
        most["states"] = max(most["states"], sum(states.values()))
        most["gradients"] = max(most["gradients"], sum(size for size in rest.values() if size >= 64))
        most["working"] = max(most["working"], sum(storages(torch.bfloat16, set()).values()))

    for step in range(2):
        for number in range(job.accumulation):
            weights.start_micro_batch(last=number == job.accumulation - 1)
            loss = model(tokens, tokens, 8)
            if step and job.layout.zero_stage != 3:
                with torch.no_grad():
                    del loss
                    look()  # the working copy stands, no activation lives
                loss = model(tokens, tokens, 8)
            loss.backward()
            del loss
            if step:
                look()
        weights.collect_gradients()
        optimizer.step()
        weights.zero_gradients()
    sizes = {name: prod(shard.shape) for name, shard in weights.shards().items()}
    return {**most, "parameters": sum(sizes.values()), "last_unit": sizes["embed.weight"]}


ROWS: dict[str, tuple[dict[str, int], Callable[[int], dict[str, float]]]] = {
    "zero 0": ({"dp_replicate": 2}, lambda a: {"masters": 4, "working": 2, "gradients": 4, "states": 8}),
    "zero 1": (
        {"dp_shard": 2, "zero": 1},
        lambda a: {"masters": 2, "working": 2, "gradients": 4 if a > 1 else 2, "states": 4},
    ),
    "zero 2": ({"dp_shard": 2, "zero": 2}, lambda a: {"masters": 2, "working": 2, "gradients": 2, "states": 4}),
    "zero 3": ({"dp_shard": 2, "zero": 3}, lambda a: {"masters": 2, "gradients": 2, "states": 4}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("row", ROWS)
def test_bytes_a_parameter_equal_the_documented_row(row: str, accumulation: int) -> None:
    layout, expected = ROWS[row]
    for rank in run_ranks(census, 2, make_job(accumulation, **layout)):
        if layout.get("zero", 0) >= 2 and accumulation > 1:
            rank["gradients"] -= 4 * rank["last_unit"]
        counted = {kind: rank[kind] / rank["parameters"] for kind in expected(accumulation)}
        assert counted == pytest.approx(expected(accumulation), rel=1e-9), (row, accumulation, counted)


def gradients_at_the_end_of_a_pipeline_step(job: Job) -> tuple[int, int]:
    """Bytes of fp32 gradients a rank holds after its last backward, and the parameters of its stage."""
    gc.freeze()
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    masters = {p.untyped_storage().data_ptr() for p in weights.masters.values()}
    data = iter(Loader(Stream([RunningWindows(unequal_corpus(job).train, 8)], seed=0), global_batch=job.accumulation))
    counted = [0]

    def look(action: Action, started: float, ended: float, held: int) -> None:
        if held == 0:
            collect_settled()
            counted[0] = sum(size for size in storages(torch.float32, masters).values() if size >= 64)

    engine.watch(look)
    engine.accumulate(next(data), 1)
    return counted[0], sum(prod(shard.shape) for shard in weights.shards().values())


def test_a_pipeline_holds_its_gradients_whole_until_the_step_ends() -> None:
    for gradients, parameters in run_ranks(gradients_at_the_end_of_a_pipeline_step, 4, make_job(3, dp_shard=2, pp=2)):
        assert gradients == 4 * parameters  # dp_shard = 2 would leave half of it on a rank
