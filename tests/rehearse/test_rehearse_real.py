"""A rehearsed rank against the same rank among real ones: what it holds and what it sends are equal."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.job import Job
from meshwright.layout import is_asynchronous, ranks_of
from meshwright.parallel import World, join_world
from meshwright.rehearse.messages import bytes_of
from meshwright.rehearse.rank import for_rehearsal, join_alone, run_measured
from meshwright.train import Silent, Trainer
from meshwright.verify import load_matrix, run_ranks
from meshwright.verify.collectives import Operation, read_one
from meshwright.verify.documents import unequal_corpus

STEPS = 2
"""The first allocates the optimizer's states, the second is like all later ones."""


@dataclass
class Samples(Silent):
    """The memory of a rank at every block and phase of its steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, training: Trainer) -> None:
        if not is_asynchronous(training.job):
            training.watch_memory(self.rows.append, STEPS)


def among_real_ranks(job: Job) -> list[dict[str, Any]]:
    return trained(job, join_world(job, torch.device("cpu")))


def alone(job: Job, rank: int, folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    writer = join_alone(rank, ranks_of(job.layout), 8, folder)
    writer.on = True
    return trained(job, join_world(job, torch.device("cpu")))


def trained(job: Job, world: World) -> list[dict[str, Any]]:
    samples = Samples()
    run_measured(job, unequal_corpus(job), world, samples)  # type: ignore[arg-type]
    return samples.rows


def places(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], row["at"], row["micro_batch"], row["layer"]) for row in rows]


def held(row: dict[str, Any]) -> int:
    return sum(row[f"{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer", "activations"))


def assert_same_memory(rows: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """Equal at every block and phase. Only gloo's own threads may still hold what they have just sent or reduced."""
    assert places(rows) == places(expected)
    pairs = [(held(row), held(other)) for row, other in zip(rows, expected, strict=True)]
    assert all(own <= (1 + tolerance) * real for own, real in pairs), pairs
    equal = [own >= (1 - tolerance) * real for own, real in pairs]
    assert sum(equal) >= 0.9 * len(equal), pairs


def issued(folder: Path, rank: int) -> list[Operation]:
    return [operation for operation in read_one(folder, rank).operations if not operation.objects]


def compare(job: Job, folder: Path, ranks: list[int], *, even: bool = True) -> None:
    """Rehearse some ranks and hold them to the real ones; with experts, `even` only if all get equally many tokens."""
    real, rehearsed = folder / "real", folder / "rehearsed"
    real.mkdir()
    rehearsed.mkdir()
    job = for_rehearsal(job, STEPS)
    expected = run_ranks(among_real_ranks, ranks_of(job.layout), job, record=real)
    for rank in ranks:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            rows = process.submit(alone, job, rank, rehearsed).result()
        assert_same_memory(rows, expected[rank], 0.01 if even else 0.1)
        own, others = issued(rehearsed, rank), issued(real, rank)
        assert [(op.kind, op.ranks, op.peer) for op in own] == [(op.kind, op.ranks, op.peer) for op in others]
        moved = [op.kind == "all_to_all_single" and not even for op in own]
        sizes = [[bytes_of(op) for op, skip in zip(ops, moved, strict=True) if not skip] for ops in (own, others)]
        assert sizes[0] == sizes[1]


def line(name: str) -> Job:
    return next(line.job for line in load_matrix() if line.name == name)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("mistral · dp_shard 2, zero 3, sliding window", [1]),
        ("llama · tp 2", [1]),
        ("llama · cp 2", [1]),
        ("llama · cp 2, ulysses", [0]),
        ("qwen3 · pp 2, 1f1b, 5 micro-batches, 3 layers", [0, 1]),
        ("llama · dp_shard 2, pp 2, zero 2, zb-h1", [2]),
        ("moe-capacity · dp_shard 2, ep 2", [1]),
    ],
)
def test_a_rehearsed_rank_holds_and_sends_what_a_real_one_does(name: str, ranks: list[int], tmp_path: Path) -> None:
    compare(line(name), tmp_path, ranks)


def test_experts_get_about_as_many_tokens_as_among_real_ranks(tmp_path: Path) -> None:
    compare(line("moe · dp_shard 2, ep 2"), tmp_path, [1], even=False)
