"""Any layout loads any layout: one run that changes its layout at every step, against one that never does.

At each change the state is loaded, saved again at once (bit-equal to what was loaded: parameters, optimizer states,
position) and trained for one step, whose loss and gradient norm are those of the process that trained alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import Checkpoint, Keeper, Lease, checkpoint_path, differences
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.parallel import World, build, join_world
from meshwright.train import make_training
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
    "tp2·pp2·dp2": {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1, "kv_replicate": True},
}
CHAIN = ["single", "zero1·dp4", "zero3·dp4", "tp4", "tp2·dp2", "pp2·dp2", "pp4", "cp2·dp2", "tp4", "tp2·copies2"]
CHAIN += ["zero3·dp4"]
END = ["tp2·pp2·dp2", "single"]
TIED = ["pp2·dp2", "tp4", "dualpipe"]


class Memory:
    """Recorder and progress that keep the numbers."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append((row["loss"], row["grad_norm"]))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def sample(self, step: int, text: str) -> None: ...

    def step(self, row: dict[str, Any]) -> None: ...

    def evaluation(self, step: int, val_loss: float) -> None: ...

    def message(self, text: str) -> None: ...


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
    return Job.model_validate(sections)


def one_step(job: Job, world: World, run: Path, done: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """Load what was saved, save it again elsewhere, make one step, save that."""
    memory = Memory()
    engine, weights = build(job, world, dtype)
    training = make_training(job, unequal_corpus(job), engine, weights, memory, memory, world)

    def keeper(folder: Path) -> Keeper:
        place = {"rank": world.rank, "ranks": world.size, "sums": world.sum_over_world}
        return Keeper(
            job, Lease(folder, 0), memory.event, memory.message, lambda n: torch.empty(n, dtype=torch.uint8), **place
        )

    if done:
        training.resume(Checkpoint.open(checkpoint_path(run, done)))
        again = run.with_name(f"{run.name}-again-{done}")
        if world.rank == 0:
            Lease.claim(again)
        world.barrier()
        keeper(again).finish(done, training.capture)
    training.run(stop=lambda: True)
    keeper(run).finish(done + 1, training.capture)
    [row] = memory.rows
    return row


def chain(names: list[str], run: Path, done: int, steps: int, changes: dict[str, Any], wide: bool) -> list[Any]:
    """On every rank: one step in each layout; a layout of one rank is rank 0's alone."""
    dtype, rows = (torch.float64 if wide else None), []
    torch.manual_seed(dist.get_rank())
    for name in names:
        job = make_job(LAYOUTS[name], steps, **changes)
        if name != "single":
            rows.append(one_step(job, join_world(job, torch.device("cpu")), run, done, dtype))
        elif dist.get_rank() == 0:
            rows.append(one_step(job, World(torch.device("cpu")), run, done, dtype))
        dist.barrier()
        done += 1
    return rows


def alone(steps: int, changes: dict[str, Any], wide: bool) -> list[tuple[float, float]]:
    job, memory, world = make_job({}, steps, **changes), Memory(), World(torch.device("cpu"))
    engine, weights = build(job, world, torch.float64 if wide else None)
    make_training(job, unequal_corpus(job), engine, weights, memory, memory, world).run()
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_that_changes_its_layout_at_every_step(tmp_path: Path, tied: bool) -> None:
    names = TIED if tied else CHAIN
    steps = len(names) + (0 if tied else len(END))
    batch = 8 if tied else 4  # the least for dualpipe, and for four data-parallel ranks
    changes = {"model": {"tied": tied}, "batch": {"global_batch": batch}}
    run = tmp_path / "run"
    Lease.claim(run)
    rows = run_ranks(chain, 4, names, run, 0, steps, changes, True)[0]
    if not tied:
        rows += run_ranks(chain, 8, END, run, len(names), steps, changes, True)[0]
        names = [*names, *END]
    check(names, rows, alone(steps, changes, True))
    same_after_loading(run, steps, batch)
    assert {ranks_of(make_job(LAYOUTS[name], 1).layout) for name in CHAIN} == {1, 4}


OPTIMIZERS = {
    "adamw int8": {"precision": {"optimizer_states": "int8"}},
    "muon bf16": {"optimizer": {"name": "muon"}, "precision": {"optimizer_states": "bf16"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
}


def _every_optimizer(run: Path, names: list[str]) -> dict[str, list[Any]]:
    return {
        optimizer: chain(names, run / str(number), 0, len(names), changes, False)
        for number, (optimizer, changes) in enumerate(OPTIMIZERS.items())
    }


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
