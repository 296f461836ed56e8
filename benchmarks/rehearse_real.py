"""Rehearsed ranks against real ones: lines of the matrix, run by CPU processes together and by ranks that are alone.

    python benchmarks/rehearse_real.py [--only TEXT] [--all] [--ranks N] [--out FILE]

Every rank of a line takes two steps twice: among real ranks over gloo, and rehearsed. Compared are its collectives and
messages (number, order, group, bytes) and the bytes of live tensors at every block and phase. Experts get equally many
tokens (`experts.force_balance`), since routers that see other numbers choose differently; what that leaves out is the
imbalance of a real training. --all takes every line of the matrix of at most --ranks ranks that both can run.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

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
KINDS = ("parameters", "gradients", "optimizer", "activations")

LINES = (
    "llama · dp_replicate 2",
    "llama · dp_shard 2, zero 1, accumulation 3",
    "gpt2 · dp_shard 2, zero 2, accumulation 3",
    "qwen3 · dp_shard 3, zero 3, accumulation 3",
    "mistral · dp_shard 2, zero 3, sliding window",
    "llama · zero 3, recompute full",
    "llama · zero 3, recompute selective",
    "llama · zero 3, offload all, recompute full",
    "llama · fp16, dp_shard 2, zero 3",
    "gpt2 · dp_replicate 2, dp_shard 2, zero 3, accumulation 3",
    "llama · tp 2",
    "llama · tp 2, no sp",
    "gpt2 · tp 3, 18 tokens",
    "qwen2 · tp 4, each key-value head on two ranks",
    "llama · bf16, tp 2",
    "llama · dp_shard 2, zero 3, tp 2",
    "llama · cp 2",
    "gpt2 · cp 4, allgather",
    "llama · cp 2, ulysses",
    "llama · dp_shard 2, cp 2, zero 3",
    "qwen3 · cp 2, tp 2",
    "llama · pp 4, gpipe, 5 micro-batches, 5 layers",
    "qwen3 · pp 2, 1f1b, 5 micro-batches, 3 layers",
    "llama · pp 4, 1f1b, 9 micro-batches, 5 layers",
    "qwen3 · pp 2, interleaved, 4 micro-batches, 5 layers",
    "llama · pp 4, zb-h1, 9 micro-batches, 5 layers",
    "qwen3 · pp 2, zb-v, 5 micro-batches, 5 layers",
    "llama · pp 2, dualpipe, 4 micro-batches, 3 layers",
    "llama · pp 2, recompute full",
    "llama · dp_shard 2, pp 2, zero 2, zb-h1",
    "gpt2 · dp_shard 2, pp 2, zero 3, tied",
    "llama · tp 2, pp 2",
    "qwen3 · cp 2, pp 2, tied",
    "moe · dp_shard 2, ep 2",
    "moe · dp_shard 2, ep 2, zero 1",
    "moe · dp_shard 4, ep 2, zero 3",
    "moe · tp 2, ep 2",
    "moe · cp 2, ep 2",
    "moe · pp 2, dp_shard 2, ep 2",
    "moe-shared · dp_shard 2, tp 2, ep 4, zero 3",
    "moe-shared · dp_shard 2, ep 2, full recomputation",
    "moe-capacity · dp_shard 2, ep 2",
    "deepseek · pp 2, tp 2, ep 2",
    "llama · dp_shard 2, tp 2, pp 2",
)


@dataclass(frozen=True)
class Compared:
    """One rank, real and rehearsed."""

    rank: int
    samples: list[tuple[int, int]]
    """Bytes that the rehearsed and the real one hold at every block and phase; empty for asynchronous pipelines."""
    same_places: bool
    """Whether both were sampled at the same blocks and phases."""
    operations: int
    same_order: bool
    """Whether kind, group and other rank of every collective and message are equal."""
    differing: frozenset[str]
    """Kinds of collectives and messages of which one has other bytes."""

    @property
    def peaks(self) -> tuple[int, int]:
        """The most that the rehearsed and the real one hold."""
        return max((own for own, _ in self.samples), default=0), max((real for _, real in self.samples), default=0)

    @property
    def apart(self) -> float:
        """How far the peaks are apart, relative to the real one."""
        own, real = self.peaks
        return own / real - 1 if real else 0.0

    @property
    def same_messages(self) -> bool:
        """Whether number, order, groups and bytes of all collectives and messages are equal."""
        return self.same_order and not self.differing

    def within(self, tolerance: float) -> float:
        """The share of the samples that are equal within a tolerance."""
        near = [abs(own - real) <= tolerance * real for own, real in self.samples]
        return sum(near) / len(near) if near else 1.0


@dataclass
class _Samples(Silent):
    """The memory of a rank at every block and phase of its steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, training: Trainer) -> None:
        if not is_asynchronous(training.job):
            training.watch_memory(self.rows.append, STEPS)


def compare(job: Job, ranks: list[int] | None = None) -> list[Compared]:
    """Run the job's world for real, rehearse some of its ranks or all, and put them side by side."""
    job = for_rehearsal(job, STEPS)
    found = []
    with tempfile.TemporaryDirectory(prefix="meshwright-real-") as folder:
        real, alone = Path(folder, "real"), Path(folder, "alone")
        real.mkdir()
        alone.mkdir()
        expected = run_ranks(_among_real_ranks, ranks_of(job.layout), job, record=real)
        for rank in range(ranks_of(job.layout)) if ranks is None else ranks:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
                rows = process.submit(_alone, job, rank, alone).result()
            found.append(_compared(rank, rows, expected[rank], _issued(alone, rank), _issued(real, rank)))
    return found


def line(name: str) -> Job:
    """The job of a line of the matrix; its experts get equally many tokens."""
    return evenly_routed(next(line.job for line in load_matrix() if line.name == name))


def evenly_routed(job: Job) -> Job:
    """The job with tokens that take turns with experts, if it has any."""
    if job.model.experts is None:
        return job
    even = job.model.experts.model_copy(update={"force_balance": True})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": even})})


def _among_real_ranks(job: Job) -> list[dict[str, Any]]:
    return _trained(job, join_world(job, torch.device("cpu")))


def _alone(job: Job, rank: int, folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    writer = join_alone(rank, ranks_of(job.layout), 8, folder)
    writer.on = True
    return _trained(job, join_world(job, torch.device("cpu")))


def _trained(job: Job, world: World) -> list[dict[str, Any]]:
    samples = _Samples()
    run_measured(job, unequal_corpus(job), world, samples)  # type: ignore[arg-type]
    return samples.rows


def _issued(folder: Path, rank: int) -> list[Operation]:
    return [operation for operation in read_one(folder, rank).operations if not operation.objects]


def _compared(
    rank: int, rows: list[dict[str, Any]], expected: list[dict[str, Any]], own: list[Operation], real: list[Operation]
) -> Compared:
    orders = [[(one.kind, one.ranks, one.peer) for one in operations] for operations in (own, real)]
    pairs = zip(own, real, strict=False)
    return Compared(
        rank=rank,
        samples=[(_held(row), _held(other)) for row, other in zip(rows, expected, strict=False)],
        same_places=[_place(row) for row in rows] == [_place(row) for row in expected],
        operations=len(own),
        same_order=orders[0] == orders[1],
        differing=frozenset(one.kind for one, other in pairs if bytes_of(one) != bytes_of(other)),
    )


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["step"], row["at"], row["micro_batch"], row["layer"]


def _held(row: dict[str, Any]) -> int:
    return sum(row[f"{kind}_bytes"] or 0 for kind in KINDS)


def main() -> None:
    """Compare every line, print as results come, write after each one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--all", action="store_true", help="all lines of the matrix")
    parser.add_argument("--ranks", type=int, default=8, help="lines of at most so many ranks")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    print(__doc__)
    rows = []
    for one in load_matrix():
        size = ranks_of(one.job.layout)
        if not (asked.all or one.name in LINES) or asked.only not in one.name or not 1 < size <= asked.ranks:
            continue
        if one.through_train or one.job.run.compile:  # compiled code on a CPU shows no activations
            continue
        began = time.monotonic()
        ranks = compare(evenly_routed(one.job))
        rows.append({"line": one.name, "ranks": [shown(rank) for rank in ranks]})
        print(f"{one.name}: {sentence(ranks)}, {time.monotonic() - began:.0f} s", flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(report(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def shown(one: Compared) -> dict[str, Any]:
    """A rank as it is kept."""
    return {
        "rank": one.rank,
        "rehearsed_peak_bytes": one.peaks[0],
        "real_peak_bytes": one.peaks[1],
        "peaks_apart": round(one.apart, 5),
        "samples": len(one.samples),
        "samples_within_1_percent": round(one.within(0.01), 4),
        "same_samples": one.same_places,
        "collectives": one.operations,
        "same_collectives": one.same_messages,
    }


def sentence(ranks: list[Compared]) -> str:
    """A line's ranks in words."""
    same = all(one.same_messages for one in ranks)
    most = max((one.apart for one in ranks), key=abs)
    least = min(one.within(0.01) for one in ranks)
    issued = sum(one.operations for one in ranks)
    return (
        f"{len(ranks)} ranks, {issued} collectives {'equal' if same else 'DIFFER'}, peaks {most:+.2%} apart at most, "
        f"{least:.0%} of the samples within 1%"
    )


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept."""
    ranks = [rank for row in rows for rank in row["ranks"]]
    return {
        "date": datetime.now().date().isoformat(),
        "torch": torch.__version__,
        "lines": len(rows),
        "ranks": len(ranks),
        "ranks_with_equal_collectives": sum(rank["same_collectives"] for rank in ranks),
        "ranks_whose_peaks_are_within_1_percent": sum(abs(rank["peaks_apart"]) <= 0.01 for rank in ranks),
        "largest_difference_of_peaks": max((rank["peaks_apart"] for rank in ranks), key=abs),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
