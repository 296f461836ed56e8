"""How fast and how large the studio is: first page, answers of the planner, and a folder of 100 runs of 100,000 steps.

    python benchmarks/studio.py [--runs 100] [--steps 100000] [--folder DIR]

Times are wall time, whatever else this machine does: it reports how busy it was. Of plans it reports the planner's CPU
time, too, which others do not lengthen as much. `--only-plans` leaves out the runs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

MODELS = ("gpt2", "llama-3.2-1b", "llama-3-8b", "qwen3-32b", "llama-3-70b")
CLUSTERS = ((1, 8, "h100"), (2, 8, "a100-80gb"), (1, 8, "h200"), (16, 8, "h100"), (64, 8, "h100"), (1, 4, "l40s"))


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=None, help="Keep generated runs here, and reuse them.")
    parser.add_argument("--only-plans", action="store_true")
    asked = parser.parse_args()
    if asked.only_plans:
        asked.runs = 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = asked.folder or Path(scratch)
        names = make_runs(runs, asked.runs, asked.steps)
        print(json.dumps({"load_before": os.getloadavg()[0], **measured(runs, names)}, indent=2))


def make_runs(folder: Path, count: int, steps: int) -> list[str]:
    """Runs that differ, written once line by line and copied with different noise."""
    from meshwright.runs import RunFolder

    names = [f"run-{number:03}" for number in range(count)]
    for number, name in enumerate(names):
        if (folder / name).exists():
            continue
        run = RunFolder.create(folder / name, "[run]\n", {"run": {"steps": steps}}, ["meshwright"])
        run.event("start", device="CPU", parameters=1_000_000, gpu=None, ranks=1, attempt=0, step=0)
        noise = random.Random(number)
        with (run.path / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                loss, norm, rate = 2 + 8 / step**0.3 + 0.1 * noise.random(), noise.random(), 5e4 * noise.random()
                file.write(
                    f'{{"step": {step}, "loss": {loss:.8f}, "grad_norm": {norm:.8f}, "lr": 0.0003, '
                    f'"tokens": {step * 65536}, "tokens_per_s": {rate:.6f}, "mfu": 0.41, "data_wait_s": 0.00012, '
                    f'"step_s": 0.51, "memory_bytes": 41234567168, "attempt": 0}}\n'
                )
        run.event("stop", reason="finished", step=steps)
    return names


def measured(runs: Path, names: list[str]) -> dict[str, Any]:
    """Start a studio, send the page's requests, and inspect its processes."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "meshwright", "studio", "--runs", str(runs), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        get(address)
        first_page_s = time.perf_counter() - begun
        if not names:
            return {"first_page_s": round(first_page_s, 3), **plans(address, server.pid)}
        listed_s = timed(lambda: get(f"{address}api/runs"))
        overlay = all_curves(address, names)
        again_s = timed(lambda: get(f"{address}api/curves?" + "&".join(f"run={name}" for name in names)))
        memory = resident(server.pid)
        planning = plans(address, server.pid)
        return {
            "first_page_s": round(first_page_s, 3),
            "runs": len(names),
            "list_s": round(listed_s, 3),
            "overlay_first_s": round(overlay, 2),
            "overlay_again_s": round(again_s, 3),
            "server_mib": memory,
            "planner_mib": [resident(int(child)) for child in children(server.pid)],
            **planning,
        }
    finally:
        server.terminate()
        server.wait()


def all_curves(address: str, names: list[str]) -> float:
    """Seconds until every run has been read, asking as the page does."""
    begun, left = time.perf_counter(), list(names)
    while left:
        for start in range(0, len(left), 50):
            found = get(f"{address}api/curves?" + "&".join(f"run={name}" for name in left[start : start + 50]))
            done = {name for name, one in found["runs"].items() if one["read"] >= 1}
            left = [name for name in left if name not in done]
    return time.perf_counter() - begun


def plans(address: str, server: int) -> dict[str, Any]:
    """Seconds of an answer with its pictures, for models and machines of the page's lists, each twice.

    As the page asks: first for the layouts, then for the pictures of the best.

    The very first one may also wait for the planner's process to start.
    """
    cold, warm, cpu = {}, {}, {}
    first_s = timed(
        lambda: post(address, {"part": "search", "model": "tiny-llama", "nodes": 1, "gpus": 1, "gpu": "h100"})
    )
    for times in (cold, warm):
        for model in MODELS:
            for nodes, gpus, gpu in CLUSTERS:
                state = {
                    "model": model,
                    "nodes": nodes,
                    "gpus": gpus,
                    "gpu": gpu,
                    "seq": 1024 if "gpt" in model else None,
                }
                begun, used = time.perf_counter(), cpu_s(server)
                found = post(address, {"part": "search", **state})
                if found.get("rows"):
                    post(address, {"part": "layout", **state, "pick": found["rows"][0]["pick"]})
                name = f"{model} on {nodes}x{gpus}x{gpu}"
                times[name] = time.perf_counter() - begun
                if times is cold:
                    cpu[name] = cpu_s(server) - used
    told = {}
    for name, times in (("cold", cold), ("again", warm), ("cold, CPU time of server and planner", cpu)):
        ordered = sorted(times.values())
        told[name] = {
            "median_s": round(ordered[len(ordered) // 2], 3),
            "worst_s": round(ordered[-1], 3),
            "worst": max(times, key=lambda each: times[each]),
            "above_300_ms": sum(value > 0.3 for value in ordered),
            "of": len(ordered),
        }
    return {"first_answer_s": round(first_s, 3), "plans": told}


def get(address: str) -> Any:
    with urllib.request.urlopen(address) as reply:
        body = reply.read()
    return json.loads(body) if body.startswith(b"{") else body


def post(address: str, question: dict[str, Any]) -> Any:
    data, headers = json.dumps(question).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}api/plan", data, headers)) as reply:
        return json.loads(reply.read())


def timed(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def resident(pid: int) -> float:
    """MiB a process holds in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.partition("VmRSS:")[2].split()[0]) / 1024, 1)


def cpu_s(server: int) -> float:
    """CPU seconds that the server and its planner have used so far."""
    ticks = 0
    for pid in (server, *map(int, children(server))):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


if __name__ == "__main__":
    main()
