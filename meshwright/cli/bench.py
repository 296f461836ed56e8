"""`meshwright bench`: measure a job's throughput here, and where its time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import JOB, JSON, SET, TRUST
from meshwright.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from meshwright.job import Job
    from meshwright.measure import Bench
    from meshwright.ranks import Place

SWEEP = typer.Option(
    [], "--sweep", metavar="FIELD=V,V", help="Measure every combination of these values; may be repeated."
)
DATA = typer.Option(False, "--data", help="Measure the job's loader, and how much of a step waits for it.")
STEP_TIME = typer.Option(
    None, "--step-time", metavar="SECONDS", min=0.0, help="With --data, a step's time without data, instead of a run."
)
SHOWN_KERNELS = 20
OUT = typer.Option(
    None, "--out", metavar="FILE", help="Where a sweep saves its rows; it continues from an existing file."
)


def bench(
    job: str = JOB,
    overrides: list[str] = SET,
    steps: int = typer.Option(10, "--steps", min=1, help="Steps to time."),
    warmup: int = typer.Option(3, "--warmup", min=1, help="Warm-up steps, not timed."),
    nproc: int | None = typer.Option(None, "--nproc", min=1, help="Start this many ranks, one per GPU or CPU process."),
    profile: bool = typer.Option(False, "--profile", help="Also report which kernels take the time."),
    trace: bool = typer.Option(False, "--trace", help="Also write a profile of two steps per rank, for Perfetto."),
    nvtx: bool = typer.Option(False, "--nvtx", help="With --trace, mark the steps for nsys instead of writing files."),
    data: bool = DATA,
    step_time: float | None = STEP_TIME,
    sweep: list[str] = SWEEP,
    out: Path | None = OUT,
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Time a job's training steps; nothing is saved. Inside torchrun or srun it runs as one of the ranks."""
    from meshwright.cli.output import stderr_console, stdout_console
    from meshwright.job import load_job
    from meshwright.ranks import own_place

    place = own_place()
    console = stderr_console() if as_json else stdout_console()
    counts = ("--steps", str(steps), "--warmup", str(warmup), *["--profile"] * profile, *["--trust"] * trust)
    counts += (*["--trace"] * trace, *["--nvtx"] * nvtx, *["--data"] * data)
    if step_time is not None:
        counts += ("--step-time", str(step_time))
    if data and (profile or trace):
        raise UserError("--data measures the loader, which has no kernels; leave out --profile and --trace")
    if step_time is not None and not (data and step_time > 0):
        raise UserError(f"--step-time {step_time:g} is a step's time in seconds for --data; give both, and more than 0")
    if nvtx and not trace:
        raise UserError("--nvtx marks the steps of --trace for nsys; add --trace")
    if out is not None and not sweep:
        raise UserError(
            f"--out {out} is where a sweep saves its rows; give --sweep too, or redirect the output of --json"
        )
    if place is None and sweep:
        ranks = () if nproc is None else ("--nproc", str(nproc))
        _sweep(job, overrides, sweep, (*counts, *ranks), out or Path(f"bench-{Path(job).stem}.jsonl"), console, as_json)
    elif place is None and nproc is not None and nproc > 1:
        _with_ranks(job, overrides, nproc, counts, as_json)
    else:
        traces = Path(f"bench-{Path(job).stem}-traces") if trace else None
        loaded = load_job(job, overrides, trust=trust)
        if data:
            _data_here(loaded.job, place, (steps, warmup, step_time), console, as_json)
            return
        _here(loaded.job, place, (steps, warmup, profile), (traces, nvtx), console, as_json)


def _here(
    job: Job,
    place: Place | None,
    measuring: tuple[int, int, bool],
    tracing: tuple[Path | None, bool],
    console: Console,
    as_json: bool,
) -> None:
    """Measure in this process, which runs alone or as one of the ranks."""
    from dataclasses import asdict

    from meshwright.api.measuring import measured
    from meshwright.cli.output import print_json

    console.quiet = place is not None and place.rank > 0
    result = measured(job, place, *measuring, console, *tracing)
    if result is None:
        return
    if as_json:
        print_json(asdict(result))
    else:
        _print(result, console)


def _data_here(
    job: Job, place: Place | None, measuring: tuple[int, int, float | None], console: Console, as_json: bool
) -> None:
    """Measure the loader in this process, which runs alone or as one of the ranks."""
    from dataclasses import asdict

    from meshwright.api.measuring import measured_data
    from meshwright.cli.bench_data import print_data
    from meshwright.cli.output import print_json

    console.quiet = place is not None and place.rank > 0
    result = measured_data(job, place, *measuring, console)
    if result is not None:
        print_json(asdict(result)) if as_json else print_data(result, console)


def _with_ranks(job: str, overrides: list[str], nproc: int, counts: tuple[str, ...], as_json: bool) -> None:
    from tempfile import TemporaryDirectory

    from meshwright.job import load_job

    loaded = load_job(job, overrides, trust="--trust" in counts)

    from meshwright.cli.output import rank_failures_told
    from meshwright.launch.devices import require_devices
    from meshwright.launch.elastic import run_under_agent
    from meshwright.layout import require_layout

    require_layout(loaded.job, nproc)
    require_devices(loaded.job, nproc)
    words = ["bench", job, *(word for override in overrides for word in ("--set", override)), *counts]
    with TemporaryDirectory() as folder, rank_failures_told():
        run_under_agent(loaded.job, Path(folder), nproc, [*words, "--json"] if as_json else words)


def _sweep(
    job: str,
    overrides: list[str],
    fields: list[str],
    arguments: tuple[str, ...],
    file: Path,
    console: Console,
    as_json: bool,
) -> None:
    from meshwright.cli.output import print_json
    from meshwright.measure import Sweep, settings_of

    sweep = Sweep(job, tuple(overrides), settings_of(fields), arguments, file)
    _require_one(job, overrides, sweep.settings, "--trust" in arguments)
    before, left = len(sweep.settings) - len(sweep.left()), len(sweep.left())
    if before:
        console.print(f"{before} of {len(sweep.settings)} settings are in {file} already", highlight=False)
    for number, row in enumerate(sweep.run(), start=1):
        console.print(f"{number} of {left}  {_row(row)}", markup=False, highlight=False, soft_wrap=True)
    rows = [sweep.done()[setting] for setting in sweep.settings]
    if as_json:
        print_json({"file": str(file), "rows": rows})
        return
    console.print(f"\nall {len(rows)} settings, best first ({file})", highlight=False)
    for row in sorted(rows, key=lambda row: -row.get("result", {}).get("tokens_per_s", 0.0)):
        console.print(_row(row), markup=False, highlight=False, soft_wrap=True)


def _require_one(job: str, overrides: list[str], settings: Sequence[tuple[str, ...]], trust: bool) -> None:
    """Reject a job that is invalid under every setting, before starting a process for each."""
    from meshwright.job import load_job

    refusals = []
    for setting in settings:
        try:
            load_job(job, [*overrides, *setting], trust=trust)
            return
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def _row(row: dict[str, Any]) -> str:
    setting = " ".join(row["setting"])
    if row["state"] != "measured":
        return f"{setting}: {row['state']} ({row['why']})"
    result = row["result"]
    if "samples_per_s" in result:
        wait = "" if result["data_wait_share"] is None else f", data wait {result['data_wait_share']:.2%}"
        return f"{setting}: {result['samples_per_s']:,.0f} samples/s, {result['tokens_per_s']:,.0f} tokens/s{wait}"
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    return f"{setting}: {result['tokens_per_s']:,.0f} tokens/s{mfu}, peak {_gib(result['peak_memory_bytes'])}"


def _print(result: Bench, console: Console) -> None:
    from rich.table import Table

    from meshwright.runs.traces import VIEWERS

    spread = result.step_s
    rows = {
        "device": f"{result.device} × {result.devices}" if result.devices > 1 else result.device,
        "torch": result.torch,
        "parameters": f"{result.parameters:,}",
        "step": f"{_ms(spread.median)} median of {result.steps} after {result.warmup}; 80% take "
        f"{_ms(spread.low)} – {_ms(spread.high)}, all {_ms(spread.least)} – {_ms(spread.most)}",
        "first step": f"{result.first_step_s:.1f} s, with compilation and allocation",
        "throughput": f"{result.tokens_per_s:,.0f} tokens/s ({result.tokens_per_step:,} per step)",
        "MFU": _share(result.mfu, "6·P_matmul + 12·L·S·A FLOPs per token"),
        "MFU, causal": _share(result.mfu_causal, "attention FLOPs under the causal mask"),
        "HFU": _share(result.hfu, "as the first, plus recomputed FLOPs"),
        "memory": f"peak {_gib(result.peak_memory_bytes)}, between steps {_gib(result.steady_memory_bytes)}"
        + ("" if result.reserved_memory_bytes is None else f", reserved {_gib(result.reserved_memory_bytes)}"),
        "data wait": f"{result.data_wait_share:.2%} of the time",
    }
    if result.attention is not None:
        tried = ", ".join(f"{name} {each} ms" for name, each in result.attention["milliseconds"].items())
        rows["attention"] = f"{result.attention['kernel']}, groups {result.attention['groups']} ({tried})"
    if result.phases_s is not None:
        total = sum(result.phases_s.values())
        shown = [f"{phase} {_ms(each)} ({each / total:.0%})" for phase, each in result.phases_s.items()]
        rows["phases"] = " · ".join(shown) + " (in separate steps that synchronize after each phase)"
    if result.traces:
        rows["traces"] = f"{Path(result.traces[0]).parent}, for {VIEWERS}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for term in result.predicted:
        both = f"{_of(term, 'predicted')} predicted, {_of(term, 'measured')} measured ({term['error']:+.1%})"
        console.print(f"{term['name']:12} {both}", highlight=False, markup=False, soft_wrap=True)
    if result.uncompiled is not None:
        console.print(f"warning: {result.uncompiled}", highlight=False, markup=False, soft_wrap=True)
    if result.predicted and result.prediction_note is not None:
        console.print(result.prediction_note, highlight=False, markup=False, soft_wrap=True)
    if result.kernels is not None:
        total = sum(result.kernels.kinds_s.values())
        parts = [f"{kind} {_ms(each)} ({each / total:.0%})" for kind, each in result.kernels.kinds_s.items()]
        console.print("\nkernels  " + " · ".join(parts), highlight=False, markup=False, soft_wrap=True)
        for kernel in result.kernels.top[:SHOWN_KERNELS]:
            line = f"{1e3 * kernel.seconds:9.2f} ms  {kernel.calls:6.0f} calls  {kernel.kind:13}  {kernel.name}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _share(value: float | None, how: str) -> str:
    return "–  (the device's peak or the model's FLOPs are unknown)" if value is None else f"{value:.1%} ({how})"


def _of(term: dict[str, Any], which: str) -> str:
    if term["unit"] == "bytes":
        return _gib(term[which])
    return _ms(term[which]) if term["unit"] == "s" else f"{term[which]:,.0f} {term['unit']}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**30:.2f} GiB"
