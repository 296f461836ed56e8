"""A run that hits the time limit of a real Slurm: signalled, saved, requeued, finished like an undisturbed one.

Needs root and Debian's slurm-wlm and munge (scripts/slurm-packages); takes six to eight minutes, most of it waiting.

    python benchmarks/slurm_limit.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/launch"))

from slurm_cluster import Cluster  # noqa: E402

LIMIT_MINUTES, SIGNAL_S, STEP_S, STEPS = 4, 120, 0.5, 240
PROFILE = 'title = "here"\ngpus_per_node = 2\npartition = "main"\ngpu_request = "none"\n'
SLOW = f"""
import time
from meshwright.runs import RunFolder
metric = RunFolder.metric
def slow(self, row):
    metric(self, row)
    time.sleep({STEP_S})
RunFolder.metric = slow
"""


def meshwright(folder: Path, *words: str, slow: bool = True) -> str:
    """The command in a folder; in a slow one every step takes a while."""
    path = f"{folder / 'slow'}:{ROOT}" if slow else str(ROOT)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright", *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def losses(run: Path) -> list[tuple[float, ...]]:
    """What interruptions must not change."""
    from meshwright.runs import RunFolder

    names = ("step", "loss", "grad_norm", "lr")
    return [tuple(row[name] for name in names) for row in RunFolder.open(run).metrics()]


def main() -> None:
    """Run it and print what happened as JSON."""
    folder = Path(tempfile.mkdtemp(prefix="limit-"))
    (folder / "slow").mkdir()
    (folder / "slow/sitecustomize.py").write_text(SLOW)
    (folder / "here.toml").write_text(PROFILE)
    settings = [f"run.steps={STEPS}", "run.device=cpu", "layout.dp_replicate=4", "evaluation.every_steps=0"]
    settings += [
        "model.preset=tiny-llama",
        'data.sources=["builtin:synthetic"]',
        "data.workers=0",
        "data.cache=cache",
        "batch.global_batch=4",
        "batch.micro_batch=1",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    cluster = Cluster()
    try:
        cluster.start()
        began = time.monotonic()
        words = ["--site", "here.toml", "--time", str(LIMIT_MINUTES), "--signal-before", str(SIGNAL_S)]
        meshwright(folder, "submit", "demo", *sets, "--set", "run.folder=run", *words)
        while not (folder / "run/slurm/over").exists() and time.monotonic() - began < 1200:
            time.sleep(1)
        took_s = time.monotonic() - began
        status = json.loads(meshwright(folder, "status", "run", "--json"))
    finally:
        cluster.stop()
    meshwright(folder, "train", "demo", *sets, "--set", "run.folder=quiet", "--nproc", "4", slow=False)
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    stops = [
        {key: event.get(key) for key in ("reason", "signal", "step")} for event in events if event["kind"] == "stop"
    ]
    same = losses(folder / "run") == losses(folder / "quiet")
    told = {
        "state": status["state"],
        "limit_s": 60 * LIMIT_MINUTES,
        "signal_before_s": SIGNAL_S,
        "took_s": round(took_s),
    }
    print(json.dumps({**told, "stops": stops, "losses_equal_the_quiet_runs": same}, indent=2))
    sys.exit(0 if same and status["state"] == "done" else 1)


if __name__ == "__main__":
    main()
