"""Every distinct call that the layouts of the matrix issue, once through NCCL with one rank on one GPU.

    python benchmarks/nccl_one.py record [--out FILE] [--work FOLDER]     CPU ranks: the whole matrix, in two formats
    python benchmarks/nccl_one.py replay [FILE] [--out FILE]              one GPU, one process

`record` runs each layout of the matrix on forked CPU ranks, in bf16 and in float64 (a line with its own format: in that
one; a run through `train`: in float64), and keeps each distinct call with the first layout and line of code that issued
it. Numbers are not compared. It keeps one file per layout and format in the folder and continues there. `replay`
creates groups in all the ways that jobs do and issues each call on a group of one rank; what NCCL refuses is printed
with its layout and line of code. With `--backend gloo` it does the same on a CPU.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from hashlib import sha1
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.verify.check import Check
from meshwright.verify.collectives import Call, Calls, Origin, Spec, distinct, merged, read, replay
from meshwright.verify.matrix import Line, load_matrix
from meshwright.verify.ranks import RankError
from meshwright.verify.run_check import check_run
from meshwright.verify.run_plan import as_run

FILE = Path(__file__).parent / "evidence" / "nccl_one_calls.json"
FORMATS = ("float64", "bf16")


# ---- The file ----


def as_text(calls: Calls, about: dict[str, Any]) -> str:
    """A line for each call; sites and layouts by their place in lists."""
    sites = list(dict.fromkeys(origin.site for origin in calls.origins.values()))
    layouts = list(dict.fromkeys(origin.layout for origin in calls.origins.values()))
    place = {name: number for names in (sites, layouts) for number, name in enumerate(names)}
    rows = [
        [
            call.kind,
            call.reduce,
            int(call.splits),
            int(call.asynchronous),
            [_written(spec) for spec in call.inputs],
            None if call.outputs == call.inputs else [_written(spec) for spec in call.outputs],
            place[origin.site],
            place[origin.layout],
            origin.times,
        ]
        for call, origin in calls.origins.items()
    ]
    head = {**about, "on_cpu": calls.on_cpu, "groups": calls.groups, "sites": sites, "layouts": layouts}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "calls": [\n{lines}\n]}}\n'


def from_text(text: str) -> tuple[Calls, dict[str, Any]]:
    """The calls of a file, and what it says about itself."""
    head = json.loads(text)
    origins = {}
    for kind, reduce, splits, asynchronous, inputs, outputs, site, layout, times in head.pop("calls"):
        sides = [tuple(map(_read, inputs)), tuple(map(_read, inputs if outputs is None else outputs))]
        call = Call(kind, *sides, reduce, bool(splits), bool(asynchronous))
        origins[call] = Origin(head["sites"][site], times, head["layouts"][layout])
    del head["sites"], head["layouts"]
    return Calls(origins, head.pop("on_cpu"), head.pop("groups")), head


def _written(spec: Spec) -> str:
    return f"{spec.dtype} {'x'.join(map(str, spec.shape))}{'' if spec.contiguous else ' strided'}"


def _read(text: str) -> Spec:
    dtype, shape, *strided = text.split(" ")
    return Spec(dtype, tuple(int(size) for size in shape.split("x") if size), not strided, "cuda")


# ---- Recording ----


def record(work: Path, out: Path, only: str, minutes: float) -> None:
    """Run what the folder does not have yet, as long as there is time, and write the file."""
    work.mkdir(parents=True, exist_ok=True)
    lines = [line for line in load_matrix() if only in line.name]
    tasks = [(line, dtype) for line in lines for dtype in _formats(line)]
    tasks.sort(key=_later)
    deadline = time.monotonic() + 60 * minutes
    for number, (line, dtype) in enumerate(tasks):
        path, started = _kept(work, line, dtype), time.monotonic()
        if not path.exists() and started < deadline:
            path.write_text(record_line(line, dtype))
            print(f"{number + 1}/{len(tasks)}  {time.monotonic() - started:4.1f} s  {dtype}  {line.name}", flush=True)
    kept = [json.loads(path.read_text()) for task in tasks if (path := _kept(work, *task)).exists()]
    failed = {f"{row['layout']} in {row['format']}": row["error"] for row in kept if "error" in row}
    calls = merged(from_text(row["calls"])[0] for row in kept if "calls" in row)
    about = {
        "what": "distinct calls of the matrix, as a group of one rank issues them",
        "torch": torch.__version__,
        "recorded_layouts": len({row["layout"] for row in kept if "calls" in row}),
        "layouts_in_matrix": len(lines),
        "recorded_runs": len(kept) - len(failed),
        "runs_missing": len(tasks) - len(kept),
        "operations": sum(origin.times for origin in calls.origins.values()),
        "failed": failed,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_text(calls, about))
    print(f"{about['operations']} calls, {len(calls.origins)} distinct, of {about['recorded_layouts']} layouts: {out}")


def record_line(line: Line, dtype: str) -> str:
    """What a layout issues in a format, as JSON; or why it could not run."""
    row: dict[str, Any] = {"layout": line.name, "format": dtype}
    try:
        calls = calls_of_run(line, dtype) if line.through_train else calls_of_check(line, dtype)
        row["calls"] = as_text(calls.named(f"{line.name}, {dtype}"), {})
    except (RankError, UserError) as error:
        row["error"] = str(error)
        print(f"failed: {line.name} in {dtype}: {error}", file=sys.stderr)
    return json.dumps(row)


def calls_of_check(line: Line, dtype: str) -> Calls:
    """What the first steps of a layout issue."""
    check = Check(line.job, dtype, collectives=True)
    try:
        check.start()
        while not check.finished(0.2):
            pass
        contract = check.contract()
        assert contract is not None
        return contract.calls
    finally:
        check.close()


def calls_of_run(line: Line, dtype: str) -> Calls:
    """What `train` issues, with evaluations, checkpoints and resumes in other layouts."""
    from meshwright.launch.worker import run_quietly

    job, _ = as_run(line.job, prepared=line.prepared)
    with TemporaryDirectory(prefix="nccl-one-") as folder:
        check_run(job, run_quietly, dtype, line.prepared, Path(folder))
        legs = sorted(Path(folder).iterdir())
        return merged(distinct(read(leg, len(list(leg.iterdir())))) for leg in legs)


def _formats(line: Line) -> tuple[str, ...]:
    if line.dtype:
        return (line.dtype,)
    return ("float64",) if line.through_train else FORMATS


def _later(task: tuple[Line, str]) -> tuple[int, str]:
    """Each layout in bf16, as GPUs compute, or in float64 if only that shows it; then what takes minutes (compiled
    blocks, `train`); then the rest in float64.

    Within these in no particular order, so that a recording that ends early misses some of every kind.
    """
    line, dtype = task
    once = dtype != "float64" or line.job.layout.compress != "none" or line.through_train
    slow = line.job.run.compile or line.through_train
    return (1 if slow else 0) if once else 2, _kept(Path(), line, dtype).name


def _kept(work: Path, line: Line, dtype: str) -> Path:
    return work / f"{sha1(f'{line.name} {dtype}'.encode()).hexdigest()[:16]}.json"


# ---- Replaying ----


def replay_file(file: Path, out: Path | None, backend: str) -> bool:
    """Issue the calls of a file on one rank, print and write what came of it; whether all were accepted."""
    calls, recorded = from_text(file.read_text())
    progress = Progress()
    result: dict[str, Any] = {
        "how": "python " + " ".join(["benchmarks/nccl_one.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if "nccl" in backend else "CPU",
        "recorded": recorded,
        "distinct_calls": len(calls.origins),
        "operations_on_cpu_left_out": calls.on_cpu,
        "kinds": dict(Counter(call.kind for call in calls.origins)),
        "dtypes": dict(Counter(spec.dtype for call in calls.origins for spec in call.inputs)),
        "ways": {},
    }
    good = True
    for way, eager in (("connected at first use", False), ("connected at once", True)):
        if eager and "nccl" not in backend:
            continue
        started = time.monotonic()
        outcome = replay(calls, backend, eager, progress)
        seconds = time.monotonic() - started
        counted = f"{outcome.accepted} of {len(calls.origins)} distinct calls accepted by {outcome.library}"
        print(f"{way}: {counted}, {outcome.groups} groups created ({seconds:.1f} s)")
        for reason, count in outcome.not_replayed.items():
            print(f"  not replayed: {count}, {reason}")
        for sentence in outcome.refused:
            print(f"  refused: {sentence}")
        result["ways"][way] = {**asdict(outcome), "seconds": round(seconds, 2)}
        good = good and outcome.ok
        if out is not None:  # after each way: the second may hang
            out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return good


class Progress:
    """Ends the process with the name of a call that takes longer than 30 s: NCCL itself would wait without a word."""

    def __init__(self) -> None:
        self._now, self._since = "start", time.monotonic()
        Thread(target=self._watch, daemon=True).start()

    def __call__(self, what: str) -> None:
        self._now, self._since = what, time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._since < 30:
            time.sleep(0.5)
        print(f"hangs: {self._now}", flush=True)
        os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    recording = steps.add_parser("record")
    recording.add_argument("--out", type=Path, default=FILE)
    recording.add_argument("--work", type=Path, default=Path("/tmp/nccl_one"))
    recording.add_argument("--only", default="", help="layouts whose name contains this")
    recording.add_argument("--minutes", type=float, default=math.inf, help="start no layout after this time")
    replaying = steps.add_parser("replay")
    replaying.add_argument("file", type=Path, nargs="?", default=FILE)
    replaying.add_argument("--out", type=Path)
    replaying.add_argument("--backend", default="cpu:gloo,cuda:nccl")
    args = parser.parse_args()
    if args.step == "record":
        record(args.work, args.out, args.only, args.minutes)
    elif not replay_file(args.file, args.out, args.backend):
        sys.exit(1)


if __name__ == "__main__":
    main()
