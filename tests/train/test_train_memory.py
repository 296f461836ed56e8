"""The memory curve: exact bytes of every kind at every block, the same losses as without it, nothing left behind."""

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.cost import block_cost
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.parallel import World, build, join_world
from meshwright.train import Silent, Trainer, make_trainer, memory_curve
from meshwright.train.memory_curve import WATCHED_STEPS
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

LAYERS, SEQUENCE = 3, 8
MODEL = {
    "vocab_size": 64, "width": 32, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 64,
    "max_sequence_length": 16,
}  # fmt: skip
Rows = list[dict[str, Any]]


class Losses(Silent):
    """Recorder and progress that keep the losses."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self.messages: list[str] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.found.append((row["loss"], row["grad_norm"]))

    def message(self, text: str) -> None:
        self.messages.append(text)


def make_job(**sections: dict[str, Any]) -> Job:
    given: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "batch": {"sequence_length": SEQUENCE, "global_batch": 4, "micro_batch": 2},
        "data": {"workers": 0},  # batches that wait in a queue would be counted too
        "evaluation": {"every_steps": 0},
        "run": {"steps": WATCHED_STEPS + 2, "device": "cpu"},
    }
    merged = {name: given.get(name, {}) | sections.get(name, {}) for name in given.keys() | sections.keys()}
    return Job.model_validate(merged)


def hooks(model: nn.Module) -> int:
    """Hooks of all of a model's modules, and what it calls after its blocks."""
    found = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    return found + (getattr(model, "after_block", None) is not None)


def train(job: Job, watch: bool = True, device: str = "cpu") -> tuple[Trainer, Losses, Rows]:
    world = join_world(job, torch.device(device))
    engine, weights = build(job, world)
    losses, rows = Losses(), Rows()
    training = make_trainer(job, unequal_corpus(job), engine, weights, losses, losses, world)
    assert isinstance(training, Trainer)
    if watch:
        training.watch_memory(rows.append)
    training.run()
    return training, losses, rows


def column(rows: Rows, kind: str, **where: Any) -> list[Any]:
    chosen = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return [row[f"{kind}_bytes"] for row in chosen]


def test_every_kind_is_counted_to_the_byte() -> None:
    training, _, rows = train(make_job())
    masters = training.weights.masters
    parameters = sum(master.numel() for master in masters.values())
    assert {row["step"] for row in rows} == set(range(1, WATCHED_STEPS + 1))
    assert {row["rank"] for row in rows} == {0} and set(column(rows, "host")) == {0}

    assert set(column(rows, "parameters")) == {4 * parameters}
    before = [row for row in rows if row["step"] == 1 and row["at"] != "updated"][:-1]
    assert set(column(before, "optimizer")) == {0}
    after = column(rows, "optimizer")[len(before) :]
    assert set(after) == {8 * parameters + 4 * len(masters)}  # two moments, and AdamW's count of steps
    for step in range(1, WATCHED_STEPS + 1):
        gradients = column(rows, "gradients", step=step)
        first_backward = [row["at"] for row in rows if row["step"] == step].index("backward")
        assert set(gradients[:first_backward]) == {0}
        assert column(rows, "gradients", step=step, at="backward_end") == [4 * parameters] * 2
        assert column(rows, "gradients", step=step, at="updated") == [4 * parameters]
        assert column(rows, "gradients", step=step, at="end") == [0]


def test_activations_climb_and_fall_by_what_a_block_states() -> None:
    job = make_job()
    _, _, rows = train(job)
    block = block_cost(job.model, job.batch.micro_batch, SEQUENCE, 4).saved_total
    batch = column(rows, "activations", step=1, at="end")[0]
    assert batch < 64 * job.tokens_per_step < block  # what is left is the step's own tokens and labels
    for step in range(1, WATCHED_STEPS + 1):
        for micro_batch in (1, 2):
            where = {"step": step, "micro_batch": micro_batch}
            climb = column(rows, "activations", at="forward", **where)
            fall = column(rows, "activations", at="backward", **where)
            assert [b - a for a, b in pairwise(climb)] == [block] * (LAYERS - 1)
            assert [a - b for a, b in pairwise(fall)] == [block] * (LAYERS - 1)
            [done] = column(rows, "activations", at="backward_end", **where)
            assert abs(done - batch) < 64
        assert column(rows, "activations", step=step, at="end") == [batch]


def test_recomputation_shows_inputs_kept_and_one_block_at_a_time() -> None:
    job = make_job(memory={"recompute": "full"}, run={"steps": 1})
    _, _, rows = train(job)
    block = block_cost(job.model, job.batch.micro_batch, SEQUENCE, 4).saved_total
    hidden = 4 * job.batch.micro_batch * SEQUENCE * job.model.width
    climb = column(rows, "activations", at="forward", micro_batch=1)
    assert [b - a for a, b in pairwise(climb)] == [hidden] * (LAYERS - 1)
    for layer in ("2", "1", "0"):
        [before] = column(rows, "activations", at="backward", micro_batch=2, layer=layer)
        again = column(rows, "activations", at="recompute", micro_batch=2, layer=layer)
        assert again == sorted(again) and before < again[0] and block <= again[-1] - before + hidden < 1.1 * block


def test_a_segment_is_recomputed_as_a_whole() -> None:
    """Two blocks of three: both are there again before the backward of the second."""
    job = make_job(memory={"recompute": {"segments": 2}}, run={"steps": 1})
    _, _, rows = train(job)
    block = block_cost(job.model, job.batch.micro_batch, SEQUENCE, 4).saved_total
    hidden = 4 * job.batch.micro_batch * SEQUENCE * job.model.width
    first, second, third = column(rows, "activations", at="forward", micro_batch=1)
    assert third - second == hidden and second - first < hidden
    [before] = column(rows, "activations", at="backward", micro_batch=2, layer="1")
    again = [column(rows, "activations", at="recompute", micro_batch=2, layer=layer)[-1] for layer in ("0", "1")]
    assert block <= again[0] - before + hidden < 1.1 * block
    assert 2 * block <= again[1] - before + hidden < 2.1 * block
    assert len(column(rows, "activations", at="backward", micro_batch=2)) == LAYERS


def test_nothing_changes_and_nothing_stays() -> None:
    job = make_job()
    training, losses, rows = train(job)
    _, expected, none = train(job, watch=False)
    assert losses.found == expected.found and rows and not none and not losses.messages
    assert hooks(training.engine.modules[0]) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_failing_step_is_let_go_of() -> None:
    job = make_job()
    world = World(torch.device("cpu"))
    engine, weights = build(job, world)
    with torch.no_grad():
        weights.masters["layers.0.ffn.down.weight"].fill_(float("nan"))
    quiet = Losses()
    training = make_trainer(job, unequal_corpus(job), engine, weights, quiet, quiet, world)
    training.watch_memory(lambda row: None)
    with pytest.raises(UserError, match="step 1 has loss nan"):
        training.run()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert hooks(engine.modules[0]) == 0


def broken(*_: Any, **__: Any) -> Any:
    raise AttributeError("torch has no such name any more")


@pytest.mark.parametrize(
    "place",
    [
        (memory_curve, "storage_key"),
        (memory_curve, "storage_of_reference"),
        (memory_curve, "live_gradients"),
        (memory_curve, "at_end_of_backward"),
        (memory_curve, "in_backward"),
        (memory_curve, "tree_iter"),
        (nn.Module, "register_forward_hook"),
    ],
    ids=lambda place: place[1],
)
def test_a_fault_of_its_own_is_reported_once_and_the_run_goes_on(
    place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(memory={"recompute": "full"}, run={"steps": 2})
    _, expected, _ = train(job, watch=False)
    monkeypatch.setattr(*place, broken)
    training, losses, _ = train(job)
    assert losses.found == expected.found
    [message] = losses.messages
    assert "the memory curve ends here (AttributeError: torch has no such name" in message
    assert hooks(training.engine.modules[0]) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_long_steps_are_looked_at_in_part() -> None:
    _, _, rows = train(make_job(batch={"global_batch": 12, "micro_batch": 2}, run={"steps": 1}))
    assert [row["micro_batch"] for row in rows if row["at"] == "backward_end"] == [1, 2, 3, 4, 5, 6]
    assert {row["micro_batch"] for row in rows if row["layer"]} == {1, 2, 3, 4}


@pytest.mark.thorough
def test_compiled_blocks_are_not_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    job = make_job(run={"compile": True, "steps": WATCHED_STEPS + 1})
    frames, runs = [], []
    for watch in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        runs.append(train(job, watch))
        frames.append(dict(torch._dynamo.utils.counters["frames"]))
    assert frames[0] == frames[1] and frames[0]["ok"]
    (_, expected, _), (training, found, rows) = runs
    assert found.found == expected.found
    assert set(column(rows, "activations")) == {None} and rows[0]["how"] == "parameters, gradients and states only"
    assert column(rows, "gradients", step=1, at="backward_end")[0] > 0
    assert column(rows, "gradients", step=1, at="forward", layer="0", micro_batch=1) == [0]
    assert hooks(training.engine.modules[0]) == 0


def test_a_model_of_one_s_own_is_watched_block_by_block(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\n"
        "from meshwright.model.decoder import Decoder\n"
        "from meshwright.model.sharding import DECODER_SHARDING as SHARDING\n"
        "class Own(nn.Module):\n"
        "    def __init__(self, shape):\n"
        "        super().__init__()\n"
        "        decoder = Decoder(shape)\n"
        "        self.embed, self.layers, self.head = decoder.embed, decoder.layers, decoder.head\n"
        "        self.shape, self.final_norm = shape, decoder.final_norm\n"
        "        self.position_embed, self.encoder, self.after_block, self.segments = None, None, None, None\n"
        "    forward, _default_positions = Decoder.forward, Decoder._default_positions\n"
        "    _looked_up, _placed = Decoder._looked_up, Decoder._placed\n"
        "    run_segment, run_block = Decoder.run_segment, Decoder.run_block\n"
        "def build(shape):\n"
        "    return Own(shape)\n"
    )
    _, expected, rows = train(make_job(run={"steps": 1}))
    job = make_job(model={"file": str(file)}, run={"steps": 1})
    _, found, own = train(job)
    assert found.found == expected.found
    assert [(row["at"], row["layer"]) for row in own] == [(row["at"], row["layer"]) for row in rows]


def in_layout(job: Job) -> tuple[list[Any], list[Any], Rows, int]:
    """Losses without and with the curve, the curve, and the parameters of this rank's shards."""
    _, expected, _ = train(job, watch=False)
    training, found, rows = train(job)
    return expected.found, found.found, rows, sum(master.numel() for master in training.weights.masters.values())


def zero_1(rows: Rows, own: int) -> None:
    first, second = column(rows, "gradients", step=2, at="backward_end")
    assert first == 4 * 2 * own  # whole until the last micro-batch
    assert second >= 4 * own
    assert column(rows, "gradients", step=2, at="reduced") == [4 * own]


def zero_1_in_bf16(rows: Rows, own: int) -> None:
    assert column(rows, "gradients", step=2, at="forward_end", micro_batch=2) == [4 * 2 * own]  # summed in fp32
    assert column(rows, "parameters", step=2, at="forward_end", micro_batch=2) == [4 * own + 2 * 2 * own]


def zero_3(rows: Rows, own: int) -> None:
    assert column(rows, "parameters", step=2, at="start") == [4 * own]
    gathered = [size - 4 * own for size in column(rows, "parameters", step=2, at="backward", micro_batch=1)]
    assert all(0 < size < 4 * own for size in gathered)  # some block's, never the whole model


def pipeline(rows: Rows, own: int) -> None:
    assert set(column(rows, "parameters")) >= {4 * own}
    assert {row["layer"] for row in rows} < {None, "0", "1", "2"}
    assert len(column(rows, "gradients", step=1, at="forward_end")) == 4


def pipeline_zero_3(rows: Rows, own: int) -> None:
    # Torch reduces a stage's gradients at the step's end: shards are no use before.
    assert column(rows, "gradients", step=2, at="backward_end", micro_batch=1) == [4 * 2 * own]
    assert column(rows, "parameters", step=2, at="end") == [4 * own]


def anything(rows: Rows, own: int) -> None:
    assert column(rows, "optimizer", step=1, at="updated")[0] >= 8 * own


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "holds"),
    [
        ({"dp_shard": 2, "zero": 1}, zero_1),
        ({"dp_shard": 2, "zero": 1}, zero_1_in_bf16),
        ({"dp_shard": 2, "zero": 3}, zero_3),
        ({"tp": 2}, anything),
        ({"cp": 2}, anything),
        ({"pp": 2}, pipeline),
        ({"pp": 2, "dp_shard": 2, "zero": 3}, pipeline_zero_3),
        ({"pp": 2, "schedule": "zb-h1"}, anything),
    ],
)
def test_layouts_are_watched_and_compute_the_same(layout: dict[str, Any], holds: Callable[[Rows, int], None]) -> None:
    compute = "bf16" if holds is zero_1_in_bf16 else "fp32"
    job = make_job(layout=layout, precision={"compute": compute}, batch={"micro_batch": 1}, run={"steps": 3})
    ranks = run_ranks(in_layout, ranks_of(job.layout), job)
    for expected, found, rows, own in ranks:
        assert found == expected
        assert {row["how"] for row in rows} == {"results followed"}
        ends = [row["at"] for row in rows if row["step"] == 2]
        assert ends[0] == "start" and ends[-3:] == ["reduced", "updated", "end"] and "backward" in ends
        assert column(rows, "gradients", at="end") == [0] * 3
        assert column(rows, "gradients", at="updated") == [4 * own] * 3
        holds(rows, own)


def test_peak_and_steady_memory_are_told() -> None:
    training, _, _ = train(make_job(run={"steps": 2}), watch=False)
    peak, steady = training.outcome.peak_memory_bytes, training.outcome.steady_memory_bytes
    assert peak is not None and peak > 2**20
    assert steady is None or peak >= steady > 2**20


@pytest.mark.gpu
def test_on_a_gpu_kinds_add_up_to_what_the_allocator_says() -> None:
    job = make_job(run={"device": "cuda"}, precision={"compute": "bf16"})
    device = torch.device("cuda")
    gc.collect()  # what earlier tests left behind must not be freed between two looks
    world = World(device)
    engine, weights = build(job, world)
    quiet, rows = Losses(), Rows()
    training = make_trainer(job, unequal_corpus(job), engine, weights, quiet, quiet, world)
    training.watch_memory(lambda row: rows.append({**row, "allocated_bytes": torch.cuda.memory_allocated()}))
    outcome = training.run()
    for row in rows:
        kinds = ("parameters", "gradients", "optimizer", "activations", "other")
        assert sum(row[f"{kind}_bytes"] for kind in kinds) == row["allocated_bytes"]
    parameters = sum(master.numel() for master in weights.masters.values())
    assert set(column(rows, "parameters")) == {6 * parameters}  # fp32 masters and a bf16 working copy
    climb = column(rows, "activations", step=2, micro_batch=1, at="forward")
    assert climb == sorted(climb) and climb[-1] > climb[0] > 0
    assert outcome.peak_memory_bytes > outcome.steady_memory_bytes > 0
