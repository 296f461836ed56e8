"""What compressing gradients between replicas is worth, and what it costs.

    sudo python benchmarks/compression.py wire [--rate 200mbit] [--steps 8] [--out FILE]
    python benchmarks/compression.py demo [--steps 700] [--only NAME …] [--out FILE]

`wire`: two replicas in two network namespaces, each with its own core, joined by a link shaped to a rate. Every
setting of layout.compress trains the same job in a fresh pair of processes. Printed: the median and the least time of a
step, how often each fits into the uncompressed one's, and the bytes a rank sent in a step as the run counts them
(indices and scales included) next to those that left its network interface (headers and acknowledgements included).

`demo`: the demo recipe on four CPU processes, uncompressed and compressed, to the same number of steps; as many
settings at once as there are cores. Printed: each validation loss and its distance from the uncompressed one; once
without error feedback, by forgetting it every step. "after 200": the first 200 steps are not compressed.
"""

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from wire import Wire

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "topk 10%": {"compress": "topk", "compress_ratio": 0.1},
    "topk 1%": {"compress": "topk", "compress_ratio": 0.01},
    "powersgd rank 4": {"compress": "powersgd", "compress_rank": 4},
}
RANKS = 4
"""Of the demo."""
LATER = {"compress_after": 200}
FORGETFUL = "topk 10% after 200, no feedback"
ON_DEMO = {name: SETTINGS[name] for name in ("none", "int8")}
ON_DEMO |= {"topk 10% after 200": SETTINGS["topk 10%"] | LATER, FORGETFUL: SETTINGS["topk 10%"] | LATER}
ON_DEMO |= {"powersgd rank 4 after 200": SETTINGS["powersgd rank 4"] | LATER}
ON_DEMO |= {name: SETTINGS[name] for name in ("topk 10%", "powersgd rank 4", "topk 1%")}


class Rows:
    """Recorder and progress of a run that keep its rows, each with what its interface had sent by then."""

    def __init__(self, interface: str | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes") if interface else None

    def metric(self, row: dict[str, Any]) -> None:
        seen = {"interface_bytes": int(self._counter.read_text())} if self._counter else {}
        self.rows.append(row | seen)

    def ignore(self, *args: Any, **fields: Any) -> None:
        """No progress display."""

    event = sample = step = evaluation = message = ignore


def train(job: dict[str, Any], interface: str | None, forgets: bool = False) -> list[dict[str, Any]]:
    """Train a job as one rank of it and return its rows."""
    import torch

    from meshwright.data import prepare
    from meshwright.job import Job
    from meshwright.parallel import CompressedWeights, build, join_world
    from meshwright.train import make_trainer

    torch.set_num_threads(1)
    checked = Job.model_validate(job)
    world = join_world(checked, torch.device("cpu"))
    engine, weights = build(checked, world)
    if forgets:
        assert isinstance(weights, CompressedWeights)
        reduction = weights.reduction
        reduce = reduction.reduce
        reduction.reduce = lambda masters: (reduce(masters), reduction.forget())
    rows = Rows(interface)
    corpus = prepare(checked.data, checked.model.vocab_size)
    make_trainer(checked, corpus, engine, weights, rows, rows, world).run()
    return rows.rows


def wire_job(setting: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"vocab_size": 512, "width": 384, "layers": 4, "heads": 6, "ffn_width": 1024},
        "data": {"sources": ["builtin:synthetic"], "workers": 0},
        "batch": {"sequence_length": 64, "global_batch": 4, "micro_batch": 2},
        "evaluation": {"every_steps": 0},
        "layout": {"dp_replicate": 2, "bucket_mb": 5.0, **SETTINGS[setting]},
        "run": {"steps": steps, "device": "cpu"},
    }


def measure(link: Wire, setting: str, steps: int) -> list[dict[str, Any]]:
    """The rows of rank 0 of a fresh pair of processes."""
    outputs = link.run_pair([__file__, "rank", "--setting", setting, "--steps", str(steps)], timeout_s=600)
    rows: list[dict[str, Any]] = json.loads(outputs[0].strip().splitlines()[-1])
    return rows


def wire(rate: str, steps: int) -> dict[str, Any]:
    """Every setting over the shaped link."""
    results: dict[str, Any] = {}
    with Wire(rate, mtu=9000) as link:
        for setting in SETTINGS:
            results[setting] = summary(measure(link, setting, steps), results.get("none"))
            print(f"{setting:16} {json.dumps(results[setting])}", flush=True)
    return {"rate": rate, "steps": steps, "settings": results}


def summary(rows: list[dict[str, Any]], plain: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of all steps but the first, which allocates."""
    sent = [after["interface_bytes"] - before["interface_bytes"] for before, after in pairwise(rows)]
    on_wire = statistics.median(sent)
    times = [row["step_s"] for row in rows[1:]]
    figures = {"step_s": round(statistics.median(times), 3), "fastest_step_s": round(min(times), 3)}
    figures["interface_bytes"] = on_wire
    if plain:
        counted = rows[-1]["sent_bytes"]
        figures |= {
            "counted_bytes": counted,
            "interface_over_counted": round(on_wire / counted, 4),
            "counted_ratio": round(rows[-1]["compression_ratio"], 2),
            "interface_ratio": round(plain["interface_bytes"] / on_wire, 2),
            "speed_up": round(plain["step_s"] / figures["step_s"], 2),
            "fastest_speed_up": round(plain["fastest_step_s"] / figures["fastest_step_s"], 2),
        }
    return figures


def demo(steps: int, chosen: list[str]) -> dict[str, Any]:
    """Validation losses of the demo recipe with four replicas; the uncompressed one is always among them."""
    from meshwright.data import prepare
    from meshwright.job import load_job
    from meshwright.verify.ranks import RankGroup

    base = load_job("demo", [f"run.steps={steps}", f"evaluation.every_steps={steps}", "batch.micro_batch=4"]).job
    prepare(base.data, base.model.vocab_size)
    names = ["none", *(name for name in chosen if name != "none")]
    waiting, running, rows = list(names), dict[str, RankGroup](), dict[str, list[dict[str, Any]]]()
    while waiting or running:
        if waiting and RANKS * len(running) < max(RANKS, os.cpu_count() or 1):
            setting = waiting.pop(0)
            job = base.model_dump() | {"layout": {"dp_replicate": RANKS, **ON_DEMO[setting]}}
            running[setting] = RankGroup(train, RANKS, job, None, setting == FORGETFUL, timeout_s=7200.0)
            continue
        for setting, group in list(running.items()):
            if group.poll(0.2):
                rows[setting] = group.results()[0]
                running.pop(setting).close()
                print(f"{setting:32} val_loss {_last(rows[setting], 'val_loss'):.4f}", flush=True)
    plain = _last(rows["none"], "val_loss")
    results = {
        setting: {
            "val_loss": round(_last(rows[setting], "val_loss"), 4),
            "over_none": f"{_last(rows[setting], 'val_loss') / plain - 1:+.2%}",
            "compression_ratio": round(_last(rows[setting], "compression_ratio"), 2) if ON_DEMO[setting] else 1.0,
        }
        for setting in names
    }
    print(json.dumps(results, indent=2))
    return {"ranks": RANKS, "steps": steps, "settings": results}


def _last(rows: list[dict[str, Any]], field: str) -> float:
    value: float = [row[field] for row in rows if field in row][-1]
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("wire", "demo", "rank"))
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--setting", choices=SETTINGS)
    parser.add_argument("--only", nargs="+", choices=ON_DEMO, default=list(ON_DEMO), help="settings of the demo")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "rank":
        rows = train(wire_job(arguments.setting, arguments.steps), "wire")
        if os.environ["RANK"] == "0":
            print(json.dumps(rows))
        return
    print(__doc__)
    if arguments.what == "wire":
        measured = wire(arguments.rate, arguments.steps or 8)
    else:
        measured = demo(arguments.steps or 700, arguments.only)
    result = {"date": time.strftime("%Y-%m-%d"), "what": arguments.what, **measured}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
