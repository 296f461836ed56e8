"""Several ranks on one GPU against the same ranks rehearsed one at a time: memory and messages.

    python benchmarks/rehearse_staged.py [--only TEXT] [--seconds S] [--out FILE]
    python benchmarks/rehearse_staged.py --small        # tiny models and CPU processes: seconds

Real ranks are forked processes that share the GPU; their collectives go through host memory (the "staged" group of
`verify --device cuda`), or through gloo on a CPU. Then each of these ranks is rehearsed in a process of its own, in the
same training code, with the same tokens, for as many steps. Of a GPU's memory the allocator's peak after the first step
is compared, of a CPU's the bytes of live tensors at every block and phase. Messages are compared one by one, in order:
kind, group, peer and bytes, of all steps. Experts get equally many tokens (force_balance), as a rehearsal assumes.

--out gets one JSON line per layout as soon as it is measured. No layout is begun after --seconds.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.job import Job, load_job
from meshwright.layout import ranks_of
from meshwright.parallel import World, join_world
from meshwright.rehearse.messages import bytes_of
from meshwright.rehearse.rank import for_rehearsal, join_alone, run_measured
from meshwright.train import Silent, Trainer, choose_attention, choose_device, device_name, open_corpus, prepare_device
from meshwright.verify import run_ranks, staged
from meshwright.verify.collectives import Operation, read_one

HERE = Path(__file__).parent
GIB = 2**30
STEPS = 3
"""The second is the first with optimizer states, and the third like all later ones."""
LIMIT_S = 300.0
"""Of the real ranks of one layout."""
WITHIN = 0.01

DENSE = {"model": {"preset": "llama-3.2-1b"}, "batch": {"sequence_length": 4096, "micro_batch": 1}}
EXPERTS = {
    "model": {"preset": "olmoe-1b-7b", "layers": 4, "experts.force_balance": True},
    "batch": {"sequence_length": 4096, "micro_batch": 1},
}
SMALL = {"batch": {"sequence_length": 64, "micro_batch": 1}, "run": {"device": "cpu"}, "precision": {"compute": "fp32"}}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp_shard 2, zero 3": {**DENSE, "layout": {"dp_shard": 2, "zero": 3}},
    "tp 2, sequence parallel": {**DENSE, "layout": {"tp": 2, "sp": True}},
    "pp 2": {**DENSE, "layout": {"pp": 2}},
    "cp 2": {**DENSE, "layout": {"cp": 2}},
    "dp_shard 2, ep 2, zero 3": {**EXPERTS, "layout": {"dp_shard": 2, "ep": 2, "zero": 3}},
    "dp_shard 2, pp 2, zero 2": {**DENSE, "layout": {"dp_shard": 2, "pp": 2, "zero": 2}},
}
"""A job's fields, by importance."""


@dataclass
class Samples(Silent):
    """What a rank's memory is at every block and phase of its steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, training: Trainer) -> None:
        """Called by the code that runs the rank."""
        training.watch_memory(self.rows.append, STEPS)


@dataclass(frozen=True)
class Held:
    """A rank's memory: on a GPU the allocator's peak, on a CPU the fullest moment."""

    bytes: int
    device: str


def main() -> None:
    """Compare every layout, print and write as results come; exit code 1 if one differs."""
    asked = parse()
    print(__doc__)
    began, failed = time.monotonic(), False
    for name, fields in LAYOUTS.items():
        if asked.only not in name:
            continue
        if time.monotonic() - began > asked.seconds:
            print(f"{name}: no time left", flush=True)
            continue
        row = {"layout": name, **compared(job_of(fields, asked), asked.compile)}
        failed = failed or not row.get("equal", False)
        print(f"{name}: {shown(row)}", flush=True)
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "how": " ".join((__doc__ or "").split())}, ensure_ascii=False) + "\n")
    sys.exit(failed)


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--small", action="store_true", help="tiny models on CPU processes")
    parser.add_argument("--compile", action="store_true", help="compiled blocks; on a GPU only")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "rehearse_staged.jsonl")
    asked = parser.parse_args()
    if asked.small and asked.compile:
        parser.error("--compile: compiled code on a CPU shows no activations; leave out --small")
    return asked


def job_of(fields: dict[str, dict[str, Any]], asked: argparse.Namespace) -> Job:
    """The job of a layout, at full size or small."""
    fields = {section: {**values} for section, values in fields.items()}
    if asked.small:
        fields |= {section: {**values} for section, values in SMALL.items()}
        experts = "experts.force_balance" in fields["model"]
        fields["model"] = {"preset": "tiny-moe", "experts.force_balance": True} if experts else {"preset": "tiny-llama"}
        fields["model"]["layers"] = 4
    layout = fields["layout"]
    micro_batches = 4 if layout.get("pp", 1) > 1 else 2
    fields["batch"]["global_batch"] = layout.get("dp_shard", 1) * micro_batches * fields["batch"]["micro_batch"]
    fields["run"] = {**fields.get("run", {}), "compile": asked.compile}
    sets = [f"{section}.{name}={json.dumps(value)}" for section, one in fields.items() for name, value in one.items()]
    return for_rehearsal(load_job("pretrain-1b", sets).job, STEPS)


def compared(job: Job, compiled: bool) -> dict[str, Any]:
    """The real ranks together, then each alone; what differs."""
    began, on_gpu = time.monotonic(), job.run.device != "cpu"
    row: dict[str, Any] = {"world": ranks_of(job.layout), "steps": STEPS, "compile": compiled}
    with tempfile.TemporaryDirectory() as folder:
        together, apart = Path(folder) / "together", Path(folder) / "apart"
        together.mkdir()
        apart.mkdir()
        backend = staged.NAME if on_gpu else "gloo"
        try:
            attention = row["attention"] = in_a_process(chosen_attention, job)
            given = (job, attention)
            real = run_ranks(
                among_real_ranks, row["world"], *given, timeout_s=LIMIT_S, backend=backend, record=together
            )
            row["together_s"] = round(time.monotonic() - began, 1)
            alone = [in_a_process(rehearsed, *given, rank, apart) for rank in range(row["world"])]
        except Exception as error:  # the next layout may still run
            return {**row, "state": "failed", "why": f"{type(error).__name__}: {error}"[-1500:]}
        ranks = [
            compared_rank(rank, real[rank], alone[rank], issued(together, rank), issued(apart, rank))
            for rank in range(row["world"])
        ]
    equal = all(rank["messages_equal"] and abs(rank["memory_error"]) <= WITHIN for rank in ranks)
    row |= {"state": "measured", "device": real[0].device, "torch": torch.__version__, "ranks": ranks, "equal": equal}
    return {**row, "wall_s": round(time.monotonic() - began, 1)}


def in_a_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call it in a forked process that is used for nothing else: this one never uses the GPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(function, *given).result(LIMIT_S)


def chosen_attention(job: Job) -> dict[str, Any] | None:
    """The kernel for all ranks of both kinds: ranks that measured while others compute could choose another."""
    return choose_attention(job, World(choose_device(job)))


def among_real_ranks(job: Job, attention: dict[str, Any] | None) -> Held:
    """In a forked process that is one of the job's ranks, all of them on one device."""
    return trained(job, attention, join_world(job, choose_device(job)))


def rehearsed(job: Job, attention: dict[str, Any] | None, rank: int, folder: Path) -> Held:
    """One rank, the others' messages replaced."""
    torch.set_num_threads(1)  # as the real ranks have
    device = choose_device(job)
    writer = join_alone(rank, ranks_of(job.layout), 8, folder)
    writer.on = True
    return trained(job, attention, join_world(job, device))


def trained(job: Job, attention: dict[str, Any] | None, world: World) -> Held:
    """The rank's steps, and what it held."""
    prepare_device(job, world.device)
    samples = Samples()
    training = run_measured(job, open_corpus(job), world, samples, attention)  # type: ignore[arg-type]
    if world.device.type == "cuda":
        peak = training.outcome.peak_memory_bytes
        assert peak is not None
        return Held(peak, device_name(world.device))
    kinds = ("parameters", "gradients", "optimizer", "activations")
    return Held(max(sum(row[f"{kind}_bytes"] for kind in kinds) for row in samples.rows), "CPU")


def issued(folder: Path, rank: int) -> list[Operation]:
    """What a rank issued; objects, which hold settings and no part of the training, left out."""
    return [operation for operation in read_one(folder, rank).operations if not operation.objects]


def compared_rank(
    rank: int, real: Held, alone: Held, own: list[Operation], rehearsal: list[Operation]
) -> dict[str, Any]:
    """Memory and messages of one rank."""
    pairs = [[(one.kind, one.ranks, one.peer, bytes_of(one)) for one in several] for several in (own, rehearsal)]
    first = next((place for place, (one, other) in enumerate(zip(*pairs, strict=False)) if one != other), None)
    found = {
        "rank": rank,
        "real_bytes": real.bytes,
        "rehearsed_bytes": alone.bytes,
        "memory_error": alone.bytes / real.bytes - 1,
        "messages": len(pairs[0]),
        "rehearsed_messages": len(pairs[1]),
        "message_bytes": sum(one[3] for one in pairs[0]),
        "messages_equal": pairs[0] == pairs[1] and len(pairs[0]) > 0,
    }
    if first is not None:
        found["first_difference"] = [str(several[first]) for several in pairs]
    return found


def shown(row: dict[str, Any]) -> str:
    """A layout in a line."""
    if row["state"] != "measured":
        return f"{row['state']}: {row['why']}"
    texts = []
    for rank in row["ranks"]:
        size, error = rank["real_bytes"] / GIB, rank["memory_error"]
        same = "equal" if rank["messages_equal"] else f"different ({rank.get('first_difference', 'in number')})"
        messages = f"{rank['messages']} messages of {rank['message_bytes'] / GIB:.3f} GiB {same}"
        texts.append(f"rank {rank['rank']} {size:.4f} GiB, rehearsed {error:+.2%}, {messages}")
    verdict = "as rehearsed" if row["equal"] else "NOT as rehearsed"
    return f"{verdict} on {row['device']}, {row['wall_s']} s\n  " + "\n  ".join(texts)


if __name__ == "__main__":
    main()
