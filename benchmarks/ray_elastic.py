"""A run on a real Ray cluster that loses its machines one by one and gets one back: which layouts it takes, and whether
each of them continues as a quiet run would.

    python benchmarks/ray_elastic.py [--out FILE]

A head and raylets of 4, 1, 1 and 1 CPUs run on this machine; a job of dp 2, tp 2 with four layers is submitted with
--min-ranks 1. After a few steps the largest raylet is killed, so that no machine holds tp 2, then two more, until one
rank is left; then a raylet of 4 CPUs is added. Afterwards every attempt is repeated from its first checkpoint by
`meshwright train --resume` on this machine alone in the recorded layout, and its losses must have the same bits; and
the whole is compared with one process that was never disturbed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray_cluster import JOB, ray_cluster
from ray_faults import ROOT, WAIT_S, attempts_and_step, until

from meshwright.cli import app
from meshwright.job import Job, job_of_table, job_text
from meshwright.launch.ray import FOLDER
from meshwright.launch.submitted import cancel, status_of
from meshwright.layout import ranks_of
from meshwright.runs import RunFolder

CPUS = (4, 1, 1, 1)
STEPS = 4


def disturb(run: Path) -> list[str]:
    """Run the job while machines come and go; what `status` said of each attempt."""
    folder, said = RunFolder(run), []
    with ray_cluster(CPUS) as cluster:
        app(
            ["submit", "job.toml", "--on", "ray", "--address", cluster.address, "--min-ranks", "1"],
            standalone_mode=False,
        )
        changes = [*(lambda node=node: cluster.kill(node) for node in cluster.nodes[:3]), lambda: cluster.add(4)]
        for attempt, change in enumerate([lambda: None, *changes]):
            change()
            until(lambda attempt=attempt: attempts_and_step(folder)[0] == attempt)
            begun = attempts_and_step(folder)[1]
            until(lambda begun=begun: attempts_and_step(folder)[1] >= begun + STEPS)
            said.append(status_of(run).why)
            print(said[-1], file=sys.stderr, flush=True)
        cancel(run, WAIT_S)
    return said


def train(*words: str) -> None:
    command = [sys.executable, "-m", "meshwright", "train", *words, "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def repeated(run: Path, begin: int, end: int, job: Job) -> list[float]:
    """The losses of a quiet resume of the checkpoint of one step, in a layout, to another step."""
    quiet = run.with_name("quiet")
    shutil.copytree(run, quiet)
    for later in (quiet / "checkpoints").glob("step-*"):
        if int(later.name.removeprefix("step-")) > begin:
            shutil.rmtree(later)
    shutil.rmtree(quiet / FOLDER)
    Path("layout.toml").write_text(job_text(job, "one attempt"))
    changes = [f"run.folder={quiet}", f"run.steps={end}"]
    words = [word for change in changes for word in ("--set", change)]
    train("layout.toml", "--resume", "--nproc", str(ranks_of(job.layout)), *words)
    losses = [row["loss"] for row in RunFolder.open(quiet).metrics() if begin < row["step"] <= end]
    shutil.rmtree(quiet)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began, out = time.monotonic(), given.out and given.out.absolute()
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.argv = ["meshwright"]
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("job.toml").write_text(JOB.replace("layers = 1", "layers = 4"))
        run = Path(name) / "run"
        said = disturb(run)
        folder = RunFolder.open(run)
        rows, starts, replans = folder.metrics(), folder.events("start"), folder.events("replan")
        begins = [event["step"] for event in starts]
        attempts = []
        job = folder.resolved_job().model_dump(mode="json")
        for number, (begin, end) in enumerate(zip(begins, [*begins[1:], rows[-1]["step"]], strict=True)):
            if number:
                for field, (_, now) in replans[number - 1]["changed"].items():
                    job[field.partition(".")[0]][field.partition(".")[2]] = now
            here = [row["loss"] for row in rows if begin < row["step"] <= end]
            attempts.append(
                {"ranks": starts[number]["ranks"], "from_step": begin, "to_step": end, "status": said[number]}
            )
            if number:
                same = repeated(run, begin, end, job_of_table(job, "an attempt")) == here
                attempts[-1] |= {"why": replans[number - 1]["why"], "same_bits_as_a_quiet_resume": same}
            print(attempts[-1], file=sys.stderr, flush=True)
        alone = ["layout.dp_shard=1", "layout.tp=1", "run.folder=alone", f"run.steps={len(rows)}"]
        train("job.toml", *(word for change in alone for word in ("--set", change)))
        quiet = RunFolder.open(Path("alone")).metrics()
    pairs = list(zip(quiet, rows, strict=True))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "attempts": attempts,
        "steps": len(rows),
        "steps_missing": len(rows) - len({row["step"] for row in rows} & set(range(1, len(rows) + 1))),
        "tokens_that_differ": sum(a["tokens"] != b["tokens"] for a, b in pairs),
        "largest_loss_difference": max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs),
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if out:
        out.write_text(text)
    bad = report["steps_missing"] or report["tokens_that_differ"] or report["largest_loss_difference"] > 1e-5
    sys.exit(bool(bad) or not all(one.get("same_bits_as_a_quiet_resume", True) for one in attempts))


if __name__ == "__main__":
    main()
