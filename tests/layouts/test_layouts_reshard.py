"""Any layout loads any layout: one run that changes its layout at every step, against one that never does.

At each change the state is loaded, saved again at once (bit-equal to what was loaded: parameters, optimizer states,
position) and trained for one step, whose loss and gradient norm are those of the process that trained alone.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import Checkpoint, Lease, Saver, checkpoint_path, differences
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.parallel import World, build, join_world
from meshwright.train import Silent, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.ranks import run_ranks

BOUND = 1e-9
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "zero1·dp4": {"dp_shard": 4, "zero": 1},
    "zero3·dp4": {"dp_shard": 4, "zero": 3},
    "tp4": {"tp": 4, "kv_replicate": True},
    "tp2·dp2": {"tp": 2, "dp_shard": 2, "zero": 2},
    "tp2·copies2": {"tp": 2, "dp_replicate": 2},
    "pp2·dp2": {"pp": 2, "dp_shard": 2, "zero": 1},
    "dualpipe": {"pp": 2, "dp_replicate": 2, "schedule": "dualpipe"},
    "pp4": {"pp": 4},
    "cp2·dp2": {"cp": 2, "dp_shard": 2, "zero": 2},
    "ep2·dp4": {"dp_shard": 4, "zero": 3, "ep": 2},
    "ep4·tp2·dp2": {"dp_shard": 2, "tp": 2, "zero": 1, "ep": 4},
    "ep2·pp2": {"dp_shard": 2, "pp": 2, "ep": 2},
    "tp2·pp2·dp2": {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1, "kv_replicate": True},
}
CHAIN = ["single", "zero1·dp4", "zero3·dp4", "tp4", "tp2·dp2", "pp2·dp2", "pp4", "cp2·dp2", "tp4", "tp2·copies2"]
CHAIN += ["zero3·dp4"]
END = ["tp2·pp2·dp2", "single"]
EXPERTS = ["single", "ep2·dp4", "ep4·tp2·dp2", "ep2·pp2", "zero3·dp4", "single"]
TIED = ["pp2·dp2", "tp4", "dualpipe"]


class Memory(Silent):
    """Recorder and progress that keep the numbers."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append((row["loss"], row["grad_norm"]))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def make_job(layout: dict[str, Any], steps: int, **changes: dict[str, Any]) -> Job:
    sections: dict[str, Any] = {
        "model": {
            "vocab_size": 53, "width": 16, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn_width": 24,
            "max_sequence_length": 16,
        },
        "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 1},
        "optimizer": {"lr": 1e-2, "eps": 1e-3, "clip": 0.5},
        "data": {"sources": ("builtin:synthetic",), "mask_documents": True, "workers": 0},
        "evaluation": {"every_steps": 0},
        "schedule": {"name": "constant", "warmup_steps": 1},
        "run": {"steps": steps, "device": "cpu", "seed": 4},
        "checkpoint": {"keep_last": 100},
        "layout": layout,
    }  # fmt: skip
    for section, fields in changes.items():
        sections[section] = {**sections.get(section, {}), **fields}
    if "pp" not in layout:  # a pipeline needs several micro-batches; others do the same work in one
        replicas = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
        sections["batch"]["micro_batch"] = sections["batch"]["global_batch"] // replicas
    return Job.model_validate(sections)


def some_steps(
    job: Job, world: World, run: Path, done: int, dtype: torch.dtype | None, count: int = 1, *, again: bool = True
) -> list[tuple[float, float]]:
    """Load what was saved, save it again elsewhere if asked to, make some steps, save that."""
    memory = Memory()
    engine, weights = build(job, world, dtype)
    training = make_trainer(job, unequal_corpus(job), engine, weights, memory, memory, world)

    def saver(folder: Path) -> Saver:
        place: dict[str, Any] = {"rank": world.rank, "ranks": world.size, "sums": world.sum_over_world}
        return Saver(
            job, Lease(folder, 0), memory.event, memory.message, lambda n: torch.empty(n, dtype=torch.uint8), **place
        )

    if done:
        training.resume(Checkpoint.open(checkpoint_path(run, done)))
        if again:
            folder = run.with_name(f"{run.name}-again-{done}")
            if world.rank == 0:
                Lease.claim(folder)
            world.barrier()
            saver(folder).finish(done, training.capture)
    training.run(stop=lambda: len(memory.rows) == count - 1)  # asked before the step's row is written
    saver(run).finish(done + count, training.capture)
    assert len(memory.rows) == count
    return memory.rows


def chain(names: list[str], run: Path, done: int, steps: int, changes: dict[str, Any], wide: bool) -> list[Any]:
    """On every rank: one step in each layout; a layout of one rank is rank 0's alone."""
    dtype, rows = (torch.float64 if wide else None), []
    torch.manual_seed(dist.get_rank())
    for name in names:
        job = make_job(LAYOUTS[name], steps, **changes)
        if name != "single":
            rows += some_steps(job, join_world(job, torch.device("cpu")), run, done, dtype)
        elif dist.get_rank() == 0:
            rows += some_steps(job, World(torch.device("cpu")), run, done, dtype)
        dist.barrier()
        done += 1
    return rows


def alone(steps: int, changes: dict[str, Any], wide: bool, run: Path | None = None) -> list[tuple[float, float]]:
    """One process that never changes; its last state is saved where a folder is given."""
    job, memory, world = make_job({}, steps, **changes), Memory(), World(torch.device("cpu"))
    engine, weights = build(job, world, torch.float64 if wide else None)
    training = make_trainer(job, unequal_corpus(job), engine, weights, memory, memory, world)
    training.run()
    if run is not None:
        buffer = partial(torch.empty, dtype=torch.uint8)
        Saver(job, Lease.claim(run), memory.event, memory.message, buffer).finish(steps, training.capture)
    return memory.rows


def check(names: list[str], ranks: list[tuple[float, float]], reference: list[tuple[float, float]]) -> None:
    for name, own, other in zip(names, ranks, reference, strict=True):
        assert own == pytest.approx(other, rel=BOUND), name


def same_after_loading(run: Path, steps: int, batch: int = 4) -> None:
    for step in range(1, steps):
        loaded = Checkpoint.open(checkpoint_path(run, step))
        again = Checkpoint.open(checkpoint_path(run.with_name(f"{run.name}-again-{step}"), step))
        as_many = loaded.index.ranks == again.index.ranks  # else every rank keeps the random state it had
        assert [d for d in differences(loaded, again) if as_many or not d[0].startswith("rng/")] == [], step
        assert loaded.facts == again.facts and loaded.facts.position == batch * step


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_that_changes_its_layout_at_every_step(tmp_path: Path, tied: bool) -> None:
    names = TIED if tied else CHAIN
    steps = len(names) + (0 if tied else len(END))
    batch = 8 if tied else 4  # the least for dualpipe, and for four data-parallel ranks
    layers = 2 if tied else 4  # as many as stages
    changes = {"model": {"tied": tied, "layers": layers}, "batch": {"global_batch": batch}}
    run = tmp_path / "run"
    Lease.claim(run)
    rows = run_ranks(chain, 4, names, run, 0, steps, changes, True)[0]
    if not tied:
        rows += run_ranks(chain, 8, END, run, len(names), steps, changes, True)[0]
        names = [*names, *END]
    check(names, rows, alone(steps, changes, True))
    same_after_loading(run, steps, batch)
    assert {ranks_of(make_job(LAYOUTS[name], 1).layout) for name in CHAIN} == {1, 4}


@pytest.mark.thorough
def test_a_run_that_changes_where_its_experts_are_at_every_step(tmp_path: Path) -> None:
    experts = {"count": 4, "top_k": 2, "ffn_width": 8, "scores": "sigmoid", "balance_rate": 0.1}
    changes = {"model": {"experts": experts}}
    Lease.claim(run := tmp_path / "run")
    rows = run_ranks(chain, 4, EXPERTS, run, 0, len(EXPERTS), changes, True)[0]
    check(EXPERTS, rows, alone(len(EXPERTS), changes, True))
    same_after_loading(run, len(EXPERTS))
    preference = Checkpoint.open(checkpoint_path(run, len(EXPERTS))).whole("routing/preference")
    assert preference.abs().max() >= 0.2  # which has changed who gets which token


SHALLOW = {"model": {"layers": 2}}
OPTIMIZERS = {
    "adamw int8": {"precision": {"optimizer_states": "int8"}, **SHALLOW},
    "muon bf16": {"optimizer": {"name": "muon"}, "precision": {"optimizer_states": "bf16"}, **SHALLOW},
    "adafactor": {"optimizer": {"name": "adafactor"}, **SHALLOW},
}


def _every_optimizer(run: Path, names: list[str]) -> dict[str, list[Any]]:
    return {
        optimizer: chain(names, run / str(number), 0, len(names), changes, False)
        for number, (optimizer, changes) in enumerate(OPTIMIZERS.items())
    }


@pytest.mark.thorough
def test_every_optimizers_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    """In float32, as they are kept: losses are compared with the looser bound."""
    names = ["zero3·dp4", "tp2·dp2", "single"]
    for number in range(len(OPTIMIZERS)):
        Lease.claim(tmp_path / str(number))
    rows = run_ranks(_every_optimizer, 4, tmp_path, names)[0]
    for number, (optimizer, changes) in enumerate(OPTIMIZERS.items()):
        same_after_loading(tmp_path / str(number), len(names))
        for own, other in zip(rows[optimizer], alone(len(names), changes, False), strict=True):
            assert own == pytest.approx(other, rel=2e-4), optimizer


JOURNEY: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4, "kv_replicate": True},
    "pp 2 × tp 2": {"pp": 2, "tp": 2},
    "dp 3, zero 3": {"dp_shard": 3, "zero": 3},
    "cp 2": {"cp": 2},
    "one process again": {},
}
"""From a whole tensor to columns of it, to fewer of them, to rows: the chain above never cuts what one rank saved."""
EACH = 2
"""Steps in a layout: what was loaded wrong shows in the update of the first and so in the loss of the second."""
TRAVELLERS: dict[str, tuple[dict[str, Any], bool, float]] = {
    "AdamW in float32": ({}, False, 1e-5),
    "AdamW in float64": ({}, True, 1e-9),
    "Muon and int8 in float64": (
        {"optimizer": {"name": "muon"}, "precision": {"optimizer_states": "int8"}},
        True,
        1e-9,
    ),
}
"""Muon leaves embedding and head to AdamW, so that both have their states in 8 bits."""
SIZES = {"batch": {"global_batch": 6, "micro_batch": 2}, "model": {"layers": 2}}


def _travel(layout: dict[str, Any], folder: Path, done: int) -> list[list[tuple[float, float]]]:
    """On every rank: some steps in a layout, with every optimizer."""
    rows = []
    for number, (changes, wide, _) in enumerate(TRAVELLERS.values()):
        job = make_job(layout, EACH * len(JOURNEY), **SIZES, **changes)
        world, run = join_world(job, torch.device("cpu")), folder / str(number)
        rows.append(some_steps(job, world, run, done, torch.float64 if wide else None, EACH, again=False))
    return rows


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[float, float]]]]:
    """Every optimizer through every layout, as many ranks at a time as the layout takes."""
    folder, rows = tmp_path_factory.mktemp("journey"), [list[tuple[float, float]]() for _ in TRAVELLERS]
    for number in range(len(TRAVELLERS)):
        Lease.claim(folder / str(number))
    for stop, layout in enumerate(JOURNEY.values()):
        ranks = ranks_of(make_job(layout, 1, **SIZES).layout)
        for own, more in zip(rows, run_ranks(_travel, ranks, layout, folder, stop * EACH)[0], strict=True):
            own += more
    return folder, rows


@pytest.mark.thorough
@pytest.mark.parametrize("who", TRAVELLERS)
def test_a_journey_through_layouts_is_one_quiet_run(
    journeys: tuple[Path, list[list[tuple[float, float]]]], who: str, tmp_path: Path
) -> None:
    (folder, every), number, (changes, wide, bound) = journeys, list(TRAVELLERS).index(who), TRAVELLERS[who]
    steps = EACH * len(JOURNEY)
    for step, (own, other) in enumerate(zip(every[number], alone(steps, SIZES | changes, wide, tmp_path), strict=True)):
        assert own == pytest.approx(other, rel=bound), f"step {step + 1}, {list(JOURNEY)[step // EACH]}"
    ended, quiet = (Checkpoint.open(checkpoint_path(run, steps)) for run in (folder / str(number), tmp_path))
    assert set(ended.names("model/")) == set(quiet.names("model/")) and ended.facts.position == quiet.facts.position
    assert set(ended.names("optimizer/")) == set(quiet.names("optimizer/"))
    for name in [*quiet.names("model/"), *quiet.names("optimizer/")]:
        a, b = ended.whole(name).double(), quiet.whole(name).double()
        # Gradients that nearly cancel keep fewer digits. Codes of 8 bits are equal: no sum is that near to the middle.
        assert (a - b).abs().max() <= 10 * bound * b.abs().max(), name
