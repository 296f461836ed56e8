"""`python hf_memory.py FOLDER OUT`: what import, export and a sharded start hold at most, measured in a process that
has freed nothing before (allocators keep what was freed and use it again, which would hide the growth)."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.job import Job, model_of_folder
from meshwright.model import count_parameters
from meshwright.parallel import build, join_world
from meshwright.runs.huggingface import export_run, import_folder
from meshwright.verify import run_ranks


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def sharded_start(job: Job) -> int:
    world = join_world(job, torch.device("cpu"))
    start = resident("VmRSS")
    build(job, world)
    return resident("VmHWM") - start


def main(folder: Path, out: Path) -> None:
    shape = model_of_folder(folder)
    job = Job.model_validate(
        {
            "model": shape.model_dump() | {"init_from": str(folder)},
            "layout": {"dp_shard": 4, "zero": 3},
            "batch": {"global_batch": 4, "micro_batch": 1, "sequence_length": 64},
        }
    )
    grown: dict[str, Any] = {"ranks": run_ranks(sharded_start, 4, job)}
    start = resident("VmRSS")
    import_folder(folder, out / "run")
    grown["import"] = resident("VmHWM") - start
    export_run(out / "run", out / "hf", "bf16")
    grown["export"] = resident("VmHWM") - start
    torch.ones(count_parameters(shape))
    grown["whole"] = resident("VmHWM") - start
    print(json.dumps(grown))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
