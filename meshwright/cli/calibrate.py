"""`meshwright calibrate`: measure this machine in two minutes, so that plans need not guess."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import FORCE, JSON

if TYPE_CHECKING:
    from meshwright.hardware import Profile
    from meshwright.ranks import Place

OUT = typer.Option(None, "--out", metavar="FILE", help="Write the profile here instead of this user's folder.")
EXPORT = typer.Option(
    None,
    "--export",
    metavar="FILE|FOLDER",
    help="Also write the profile here, for plans on other machines: plan --profile FILE|FOLDER.",
)


def calibrate(
    out: Path | None = OUT,
    export: Path | None = EXPORT,
    force: bool = FORCE,
    quick: bool = typer.Option(False, "--quick", help="Fewer repeats: half a minute instead of two."),
    nproc: int | None = typer.Option(None, "--nproc", min=2, help="Measure collectives too, over this many ranks."),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda."),
    as_json: bool = JSON,
) -> None:
    """Measure this machine's kernels, memory and links; later plans and benches use the profile."""
    from meshwright.cli.output import require_new
    from meshwright.ranks import own_place

    require_new(out, "--out", force)
    place = own_place()
    if export is not None and not export.is_dir():
        require_new(export, "--export", force)
    if place is None and nproc is not None:
        _with_ranks(out, export, force, quick, nproc, device, as_json)
    else:
        _here(out, export, force, quick, place, device, as_json)


def _with_ranks(
    out: Path | None, export: Path | None, force: bool, quick: bool, nproc: int, device: str, as_json: bool
) -> None:
    from tempfile import TemporaryDirectory

    from meshwright.cli.output import rank_failures_told
    from meshwright.job import Job
    from meshwright.launch.devices import require_devices
    from meshwright.launch.elastic import run_under_agent

    job = Job.model_validate({"run": {"device": device}})
    require_devices(job, nproc)
    words = ["calibrate", "--device", device, *(["--quick"] if quick else []), *(["--json"] if as_json else [])]
    words += [] if out is None else ["--out", str(out)]
    words += [] if export is None else ["--export", str(export)]
    words += ["--force"] if force else []
    with TemporaryDirectory() as folder, rank_failures_told():
        run_under_agent(job, Path(folder), nproc, words)


def _here(
    out: Path | None,
    export: Path | None,
    force: bool,
    quick: bool,
    place: Place | None,
    device: str,
    as_json: bool,
) -> None:
    from meshwright.cli.output import print_json, require_new, stderr_console, stdout_console
    from meshwright.hardware import profiles_folder, write_profile
    from meshwright.job import Job
    from meshwright.launch.devices import with_own_device
    from meshwright.launch.failures import failures_written_down
    from meshwright.measure import measure_profile, profile_name
    from meshwright.train import choose_device

    job = Job.model_validate({"run": {"device": device}})
    with failures_written_down():
        chosen = choose_device(job if place is None else with_own_device(job, place))
        if export is not None and export.is_dir():
            export = export / profile_name(chosen, place)
            require_new(export, "--export", force)
        console = stderr_console() if as_json else stdout_console()
        console.quiet = place is not None and place.rank > 0
        with console.status("measuring") as status:
            report = (lambda part: status.update(f"measuring {part}")) if console.is_terminal else (lambda part: None)
            profile = measure_profile(chosen, place, quick=quick, report=report)
    if profile is None:
        return
    path = out or profiles_folder() / profile.file_name
    write_profile(profile, path)
    if export is not None:
        write_profile(profile, export)
    if as_json:
        print_json({"file": str(path), "exported": None if export is None else str(export), **summary(profile)})
        return
    for name, value in _lines(profile, path) + ([] if export is None else [("exported", str(export))]):
        console.print(f"{name:22} {value}", markup=False, highlight=False, soft_wrap=True)


def summary(profile: Profile) -> dict[str, Any]:
    """Summarize the profile in a few figures."""
    best: dict[str, float] = {}
    for one in profile.products:
        rate = 2.0 * one.rows * one.columns * one.inner / one.seconds
        best[one.dtype] = max(rate, best.get(one.dtype, 0.0))
    largest = max(profile.copies, key=lambda one: one.moved_bytes)
    wide = [one for one in profile.collectives if one.kind == "all-reduce"]
    top = max(wide, key=lambda one: (one.ranks, one.size_bytes), default=None)
    return {
        "kind": profile.kind,
        "gpu": profile.gpu,
        "device": profile.device,
        "ranks": profile.ranks,
        "threads": profile.units if profile.on_cpu else None,
        "date": profile.date,
        "torch": profile.torch,
        "took_s": profile.took_s,
        "best_product_flops_per_s": best,
        "copy_bytes_per_s": largest.moved_bytes / largest.seconds,
        "to_device_bytes_per_s": profile.to_device_bytes_per_s,
        "to_host_bytes_per_s": profile.to_host_bytes_per_s,
        "launch_s": profile.launch_s,
        "all_reduce_bytes_per_s": None
        if top is None
        else 2.0 * (top.ranks - 1) / top.ranks * top.size_bytes / top.seconds,
        "counts": {
            name: len(getattr(profile, name))
            for name in ("products", "attentions", "operations", "copies", "losses", "collectives")
        },
        "skipped": list(profile.skipped),
    }


def _device(profile: Profile) -> str:
    """The device in words; a CPU's name says that it is one."""
    if not profile.on_cpu:
        return f"{profile.device} ({profile.gpu})"
    return profile.device + (f" in each of {profile.ranks} ranks" if profile.ranks > 1 else "")


def _lines(profile: Profile, path: Path) -> list[tuple[str, str]]:
    figures = summary(profile)
    rates = ", ".join(f"{dtype} {rate / 1e12:,.3g}" for dtype, rate in figures["best_product_flops_per_s"].items())
    counts = figures["counts"]
    lines = [
        ("device", f"{_device(profile)}, torch {profile.torch}"),
        ("products", f"{counts['products']} measured; the fastest {rates} TFLOP/s"),
        ("attention", f"{counts['attentions']} measured"),
        ("copies", f"{figures['copy_bytes_per_s'] / 1e9:,.3g} GB/s, read and written"),
    ]
    if counts["operations"]:
        lines.append(("other operations", f"{counts['operations']} measured"))
    if profile.to_device_bytes_per_s and profile.to_host_bytes_per_s:
        both = f"{profile.to_device_bytes_per_s / 1e9:.1f} GB/s in, {profile.to_host_bytes_per_s / 1e9:.1f} out"
        lines.append(("link to the host", both))
    if profile.launch_s:
        lines.append(("least operation" if profile.on_cpu else "kernel launch", f"{1e6 * profile.launch_s:.1f} µs"))
    if figures["all_reduce_bytes_per_s"]:
        rate = f"{figures['all_reduce_bytes_per_s'] / 1e9:.2f} GB/s over the links in all-reduce"
        lines.append(("collectives", f"{counts['collectives']} measured; {rate}"))
    lines += [("left out", reason) for reason in profile.skipped[:5]]
    return [*lines, ("written", f"{path} after {profile.took_s:.0f} s")]
