"""Processes of a run on a real Ray cluster, killed at random: what it costs, and what is left.

    python benchmarks/ray_faults.py [--count 20] [--seed 0] [--kinds raylet,machine,…] [--out FILE]

A head and three raylets of 2, 2 and 1 CPUs run on this machine; a job of dp 2, tp 2 is submitted with --min-ranks 1 and
saves every step. Once an attempt has made 3 steps, the next fault follows: SIGKILL to a rank, an agent, the actor that
started it, the supervisor, a raylet, or a raylet and all that runs on it (`machine`); or SIGSTOP to a raylet and all
that runs on it (`frozen`), which is sent SIGCONT once the run continues without it. A lost raylet is replaced as soon
as the run has made 3 steps without it, so that it grows again. In the end the run is cancelled, and every row is
compared with those of one process that was never disturbed.
`continued_s` is from the kill to the first step after it.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_cluster import JOB, RayCluster, ray_cluster

from meshwright.cli import app
from meshwright.launch.ray import Submission
from meshwright.launch.submitted import cancel, status_of
from meshwright.runs import RunFolder

ROOT = Path(__file__).parents[1]
LOST = ("raylet", "machine", "frozen")
KINDS = (*LOST, "supervisor", "actor", "agent", "rank")
STEPS = 3
WAIT_S = 600.0


class Victim:
    """The processes of one run, found by their command lines and parents."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def processes(self) -> list[tuple[int, int]]:
        """(pid, parent) of agents and ranks."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "meshwright.launch.ray.child" in words and str(self._run) in words:
                    found.append((int(entry.name), parent_of(int(entry.name))))
            except OSError:
                continue
        return found

    def kill(self, kind: str, chance: random.Random) -> None:
        """Kill one process of this kind; not a raylet, which the cluster must know of."""
        processes = self.processes()
        own = {pid for pid, _ in processes}
        agents = [(pid, parent) for pid, parent in processes if parent not in own]
        ranks = [pid for pid, parent in processes if parent in own]
        chosen = {"actor": [parent for _, parent in agents], "agent": [pid for pid, _ in agents], "rank": ranks}[kind]
        os.kill(chance.choice(chosen), 9)


def parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def until(true: Callable[[], Any]) -> float:
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > WAIT_S:
            raise SystemExit("the run has stopped, or left processes behind")
        time.sleep(0.1)
    return time.monotonic() - began


def attempts_and_step(folder: RunFolder) -> tuple[int, int]:
    rows = [row for row in folder.newest().rows if "loss" in row] if folder.path.is_dir() else []
    return (rows[-1]["attempt"], rows[-1]["step"]) if rows else (-1, 0)


def supervisor_of(run: Path) -> int:
    """The process of a run's supervisor."""
    import ray

    submission = Submission.read(run)
    assert submission is not None
    actor = ray.get_actor(submission.name, namespace="meshwright")
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def disturb(cluster: RayCluster, run: Path, count: int, seed: int, kinds: list[str]) -> list[dict[str, Any]]:
    """So many kills; what each was, and how long the run took to continue."""
    chance, folder, victim = random.Random(seed), RunFolder(run), Victim(run)
    raylets, faults = cluster.nodes[:2], []
    until(lambda: attempts_and_step(folder)[1] >= STEPS)
    for number in range(count):
        kind = kinds[number] if count == len(kinds) else chance.choice(kinds)
        attempt, step = attempts_and_step(folder)
        ranks = folder.events("start")[-1]["ranks"]
        lost = raylets.pop(chance.randrange(len(raylets))) if kind in LOST else None
        if kind == "raylet":
            cluster.kill(lost)
        elif lost is not None:
            cluster.signal(lost, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)
        elif kind == "supervisor":
            os.kill(supervisor_of(run), signal.SIGKILL)
        else:
            victim.kill(kind, chance)
        took = until(lambda attempt=attempt: attempts_and_step(folder)[0] > attempt)
        faults.append({"killed": kind, "at_step": step, "ranks": ranks, "continued_s": round(took, 1)})
        faults[-1]["ranks_after"] = folder.events("start")[-1]["ranks"]
        after = attempts_and_step(folder)
        until(lambda after=after: attempts_and_step(folder)[1] >= after[1] + STEPS)
        if kind == "frozen":  # it comes back, and finds that the cluster has given it up
            cluster.signal(lost, signal.SIGCONT)
        if lost is not None:
            raylets.append(cluster.add(2))
            until(lambda after=after: attempts_and_step(folder)[0] > after[0])
            grown = attempts_and_step(folder)
            until(lambda grown=grown: attempts_and_step(folder)[1] >= grown[1] + STEPS)
        print(f"{number + 1}/{count}", faults[-1], file=sys.stderr, flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began, out = time.monotonic(), given.out and given.out.absolute()
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.argv = ["meshwright"]
    with tempfile.TemporaryDirectory() as name, ray_cluster((2, 2, 1)) as cluster:
        os.chdir(name)
        Path("job.toml").write_text(JOB)
        run = Path(name) / "run"
        settings = ["--set", "run.max_restarts=1000", "--set", "checkpoint.every_steps=1"]
        words = ["submit", "job.toml", "--on", "ray", "--address", cluster.address, "--min-ranks", "1", *settings]
        app(words, standalone_mode=False)
        faults = disturb(cluster, run, given.count, given.seed, given.kinds)
        state = cancel(run, WAIT_S).state
        until(lambda: not Victim(run).processes())

        import ray
        from ray.util import placement_group_table

        groups = [one["state"] for one in placement_group_table().values()]
        free = ray.available_resources().get("CPU", 0.0)
        assert status_of(run).state == state
        rows = RunFolder.open(run).metrics()
        settings = ["layout.dp_shard=1", "layout.tp=1", "run.folder=quiet", f"run.steps={len(rows)}"]
        words = [word for setting in settings for word in ("--set", setting)]
        subprocess.run([sys.executable, "-m", "meshwright", "train", "job.toml", "--quiet", *words], check=True)
        quiet = RunFolder.open(Path("quiet")).metrics()
    pairs = list(zip(quiet, rows, strict=True))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "ray": ray.__version__,
        "seed": given.seed,
        "faults": faults,
        "state": state,
        "steps": len(rows),
        "steps_missing": len(rows) - len({row["step"] for row in rows} & set(range(1, len(rows) + 1))),
        "tokens_that_differ": sum(a["tokens"] != b["tokens"] for a, b in pairs),
        "largest_loss_difference": max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs),
        "placement_groups_left": sum(state != "REMOVED" for state in groups),
        "placement_groups_used": len(groups),
        "cpus_not_returned": 5.0 - free,
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if out:
        out.write_text(text)
    bad = ("steps_missing", "tokens_that_differ", "placement_groups_left", "cpus_not_returned")
    sys.exit(any(report[name] for name in bad) or report["largest_loss_difference"] > 1e-5)


if __name__ == "__main__":
    main()
