"""Two "hosts" in network namespaces, each with a torch agent and one rank, and the link between them cut."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from fault_runs import JOB, ROOT, Forked, Run, Traces, fork_ranks, seconds
from wire import ADDRESSES, Wire

PORT = "29519"
WATCHDOG_S = 4.0


def start_hosts(wire: Wire, folder: Path, steps: int, forked: bool) -> list[Any]:
    """torchrun on both hosts, as a user without Slurm would start it."""
    processes: list[Any] = []
    for number, space in enumerate(wire.spaces):
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        words = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}"]
        words += [f"--master-port={PORT}", "--max-restarts=3", "--monitor-interval=0.2", "-m", "meshwright", "train"]
        words += ["job.toml", "--resume", "--set", f"run.steps={steps}", "--set", f"run.watchdog_s={WATCHDOG_S}"]
        out = (folder / f"out-{number}").open("w")
        if forked:
            processes.append(Forked(partial(_host, space, words, folder), variables, out, out, folder))
            continue
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run", *words]
        pipes = {"stdout": out, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, cwd=folder, env=variables, text=True, **pipes))
    return processes


def _host(space: str, words: list[str], folder: Path) -> None:
    """In a forked process: torchrun in a network namespace, whose ranks are forked too."""
    with Path(f"/run/netns/{space}").open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    fork_ranks(folder)

    from torch.distributed.run import main

    main(words)


def steps_made(folder: Path) -> int:
    file = folder / "run/metrics.jsonl"
    return file.read_text().count('"loss"') if file.is_file() else 0


def cut_link(
    folder: Path, cut_s: float, steps: int = 150, quiet: Run | None = None, forked: bool = False
) -> dict[str, Any]:
    """Train on both hosts, cut the link for a while, and compare with an undisturbed run."""
    if quiet is None:
        quiet = Run(folder / "quiet", steps, [])
        assert quiet.finish() == 0
    hurt = folder / "hurt"
    hurt.mkdir()
    (hurt / "job.toml").write_text(JOB)
    traces = Traces(hurt)
    run = Run.__new__(Run)
    run.folder = hurt
    processes: list[Any] = []
    with Wire() as wire:
        try:
            processes = start_hosts(wire, hurt, steps, forked)
            deadline = time.monotonic() + 120.0
            while steps_made(hurt) < 8:
                running = all(process.poll() is None for process in processes)
                assert time.monotonic() < deadline and running, _words(hurt)
                time.sleep(0.05)
            wire.cut()
            began, cut_at = steps_made(hurt), time.time()
            ends = time.monotonic() + cut_s
            while time.monotonic() < ends:
                traces.look()
                time.sleep(0.2)
            wire.restore()
            codes = [process.wait(180.0) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
    expected, found = quiet.numbers(), run.numbers()
    same = sum(a == b for a, b in zip(expected, found, strict=False))
    events = [event for event in run.events() if seconds(event) > cut_at]
    hangs = [event for event in events if event["kind"] == "hang"]
    went_on = next((seconds(event) for event in events if event["kind"] == "start"), None)
    return {
        "exit_codes": codes,
        "cut_s": cut_s,
        "step_at_cut": began,
        "detected_s": round(seconds(hangs[0]) - cut_at, 2) if hangs else None,
        "named": [event["missing"] for event in hangs],
        "went_on_after_s": None if went_on is None else round(went_on - cut_at, 2),
        "causes": [event["cause"] for event in events if event["kind"] == "restart"],
        "rows_compared": len(expected),
        "rows_that_differ": max(len(expected), len(found)) - same,
        "left": traces.left(),
        "words": _words(hurt) if any(codes) else "",
    }


def _words(folder: Path) -> str:
    return json.dumps({path.name: path.read_text()[-2000:] for path in folder.glob("out-*")})
