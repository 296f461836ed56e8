"""Where the time to the end of the first step goes: with empty caches, and twice with what the run before left in them.

    python benchmarks/first_step.py [--setting 1b-tied-mb8] [--out FILE]
    python benchmarks/first_step.py --small          # on a CPU: shows that it runs

Each run is a `meshwright bench` in a process of its own (settings of peers/shapes.py, compiled, random tokens); the
folders in which torch and Triton keep compiled code are new and shared by the three. Seconds are of the wall clock:
from the start of the process to the first step, which includes importing torch and drawing the weights, then the first
step itself, and in it torch's own record of its compiler's phases (they contain each other) and every kernel that
Triton compiled in the process; kernels that other processes compiled at the same time are not listed. `median_step_s`
is a later step.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks" / "peers"))
from run import our_command, surroundings  # noqa: E402
from shapes import SETTINGS  # noqa: E402

RESULT = "FIRST_STEP_RESULT"
BEGAN = "FIRST_STEP_BEGAN"
PHASES = {
    "tracing": "bytecode_tracing",
    "forward and backward as one graph": "create_aot_dispatcher_function",
    "compiling the forward": "compile_fx.<locals>.fw_compiler_base",
    "compiling the backward": "compile_fx.<locals>.bw_compiler",
}
"""What is printed of torch's record; the whole of it is in the file."""
Row = dict[str, Any]


def main() -> None:
    """Run three times, print each, and write."""
    if RESULT in os.environ:
        inside()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), default="1b-tied-mb8")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every run")
    asked = parser.parse_args()
    print(__doc__)
    setting = SETTINGS["tiny" if asked.small else asked.setting]
    overrides = ["run.compile=true"] if asked.small else []
    words = our_command(setting, 2, 3, overrides)[3:]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm", "warm again"):
            rows.append({"run": name, **measured(words, Path(folder))})
            print(said(rows[-1]), flush=True)
            if asked.out:
                facts = {"date": time.strftime("%Y-%m-%d %H:%M"), "how": __doc__, "command": words}
                asked.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def measured(words: list[str], folder: Path) -> Row:
    """One run in a new process, whose compiled code is kept in a folder."""
    result = folder / "result.json"
    variables = surroundings() | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        RESULT: str(result),
        BEGAN: str(time.time()),
    }
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    bench = json.loads(done.stdout)
    row: Row = json.loads(result.read_text(encoding="utf-8"))
    return row | {"median_step_s": bench["step_s"]["median"], "device": bench["device"]}


def inside() -> None:
    """The command itself, with the first step watched."""
    from meshwright.train.trainer import Trainer

    kernels: list[Row] = []
    listen(kernels)
    step = Trainer.step

    def watched(self: Trainer, *given: Any, **named: Any) -> Any:
        Trainer.step = step  # type: ignore[method-assign]
        began, before = time.time(), len(kernels)
        returned = step(self, *given, **named)
        row = {"until_first_step_s": began - float(os.environ[BEGAN]), "first_step_s": time.time() - began}
        row |= {"kernels": kernels[before:], **compiler()}
        Path(os.environ[RESULT]).write_text(json.dumps(row), encoding="utf-8")
        return returned

    Trainer.step = watched  # type: ignore[assignment, method-assign]
    sys.argv[0] = "meshwright"
    runpy.run_module("meshwright", run_name="__main__", alter_sys=False)


def listen(kernels: list[Row]) -> None:
    """Note every kernel that Triton compiles or finds compiled in this process."""
    try:
        from triton import knobs
    except ImportError:
        return

    def noted(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        kernels.append({"name": src.name, "seconds": times.total / 1e6, "found": cache_hit})

    knobs.compilation.listener = noted


def compiler() -> Row:
    """Torch's record of its compiler so far, seconds by phase, and how many traced graphs it found in its cache."""
    from torch._dynamo import utils

    phases = {name: sum(seconds) for name, seconds in utils.compilation_time_metrics.items()}
    counted = utils.counters["aot_autograd"]
    found = {"found": counted["autograd_cache_hit"], "traced": counted["autograd_cache_miss"]}
    return {"phases": phases, "graphs": found | {"not kept": counted["autograd_cache_bypass"]}}


def said(row: Row) -> str:
    """A run in some lines."""
    compiled = [kernel for kernel in row["kernels"] if not kernel["found"]]
    slowest = ", ".join(
        f"{kernel['name']} {kernel['seconds']:.2f}"
        for kernel in sorted(compiled, key=lambda kernel: -kernel["seconds"])[:8]
    )
    phases = ", ".join(f"{name} {row['phases'].get(phase, 0.0):.2f}" for name, phase in PHASES.items())
    total = sum(kernel["seconds"] for kernel in compiled)
    later = f"{row['median_step_s']:.3f} s on {row['device']}"
    return (
        f"{row['run']}: {row['until_first_step_s']:.1f} s until the first step, which took {row['first_step_s']:.2f} s "
        f"(a later one {later})\n  compiler, s: {phases}; graphs {row['graphs']}\n"
        f"  kernels compiled here: {len(compiled)} in {total:.2f} s{': ' + slowest if slowest else ''}"
    )


if __name__ == "__main__":
    main()
