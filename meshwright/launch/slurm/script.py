"""The batch script: what it requests from Slurm, how the ranks start, and what a job does at its time limit."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from meshwright.errors import UserError
from meshwright.hardware import Site
from meshwright.job.sanitize import odd_character
from meshwright.launch.slurm.record import FOLDER
from meshwright.python_process import python_command, python_path
from meshwright.version import VERSION

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
Mode = Literal["requeue", "chain", "once"]
_MODES: dict[Mode, str] = {
    "requeue": "before its time limit the job is requeued",
    "chain": "before its time limit it ends and the next job continues",
    "once": "a trial: it finishes in time or fails",
}


@dataclass(frozen=True)
class Shape:
    """How many ranks, and where."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Request:
    """What is requested from Slurm besides the shape, complete."""

    time: str
    account: str | None
    partition: str | None
    qos: str | None
    signal_s: int
    """Seconds before the time limit at which the job is told to save and exit."""
    per_rank: bool
    """One task per rank instead of one agent per node."""
    container: str | None
    """An image to run in."""
    options: tuple[str, ...] = ()
    """Extra options for sbatch."""


def request_of(
    site: Site,
    time: str | None,
    account: str | None,
    partition: str | None,
    qos: str | None,
    signal_s: int,
    per_rank: bool,
    container: str | None,
    options: tuple[str, ...] = (),
) -> Request:
    """The request with the site's defaults filled in; raises if a required value is in neither."""
    given = {
        "time": time or site.time,
        "account": account or site.account,
        "partition": partition or site.partition,
        "qos": qos or site.qos,
    }
    for name in ("time", *site.asks):
        if given[name] is None:
            raise UserError(f"{site.name} needs --{name}, which is not in its profile; give it, or set it in a profile")
    seconds = seconds_of(str(given["time"]), "--time")
    if site.max_time is not None and seconds > seconds_of(site.max_time, "max_time"):
        raise UserError(f"--time = {given['time']} is longer than {site.name} allows; give at most {site.max_time}")
    if signal_s >= seconds:
        raise UserError(f"--signal-before = {signal_s} s is not less than --time = {given['time']}; give a smaller one")
    if container is not None and site.container_command is None:
        raise UserError(
            f"--container = {container}: {site.name} has no command for containers; set container_command in a profile "
            'that extends it, e.g. "apptainer exec --nv"'
        )
    return Request(
        str(given["time"]), given["account"], given["partition"], given["qos"], signal_s, per_rank, container, options
    )


def seconds_of(time: str, field: str) -> int:
    """Slurm's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise UserError(
            f"{field} = {time} is not a duration in Slurm's format; write for example 12:00:00 or 2-00:00:00"
        )
    days, *rest = found.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def batch_script(
    run: Path,
    name: str,
    site: Site,
    shape: Shape,
    request: Request,
    mode: Mode,
    max_restarts: int = 0,
    judge: str = ":",
    overrides: Sequence[str] = (),
    trust: bool = False,
    command: str = 'train "$run" --resume',
    judged: int = 0,
) -> str:
    """The whole script; `judge` is a command that may reject a job that finished.

    `overrides` are not in the run's folder yet: its ranks get them when they resume; `trust` lets them run the code
    that the submitter named. `command` is what the ranks run, and `judged` the largest exit code of it that is judged.
    """
    run = run.absolute()
    _require_words(run, request)
    directives = [f"#SBATCH {shlex.quote(word)}" for word in _directives(run, name, site, shape, request, mode)]
    lines = [
        "#!/bin/bash",
        f"# {_job_name(name)} on {site.title}: {shape.nodes} × {shape.ranks_per_node} ranks",
        f"# Written by meshwright {VERSION}.",
        *directives,
        "",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        *_surroundings(site),
        f"export run={shlex.quote(str(run))}",
        f"mode={mode} # {_MODES[mode]}",
        f"max_restarts={max_restarts} # run.max_restarts, after crashes; a lost node does not count",
        *_start(site, shape, request, command, overrides, trust),
        f"judge() {{ {judge}; }}",
        f"judged={judged} # the largest exit code that is not a failure",
        "",
    ]
    return "\n".join(lines) + files("meshwright.launch.slurm").joinpath("body.sh").read_text(encoding="utf-8")


def _require_words(run: Path, request: Request) -> None:
    """Reject what a directive line cannot express: a line end would end it, and Slurm interprets backslashes."""
    asked = [(f"--{name}", getattr(request, name)) for name in ("time", "account", "partition", "qos", "container")]
    asked += [("--sbatch", option) for option in request.options]
    for name, word in (("run.folder", str(run)), *asked):
        if word is None:
            continue
        if odd := odd_character(word):
            raise UserError(
                f"{name} = {word!r} contains the control character {odd}, which scripts may not; choose another"
            )
        if "\\" in word:
            raise UserError(f"{name} = {word!r}: Slurm interprets backslashes; choose another")


def _directives(run: Path, name: str, site: Site, shape: Shape, request: Request, mode: Mode) -> list[str]:
    words = [f"--job-name={_job_name(name)}", f"--nodes={shape.nodes}"]
    words.append(f"--ntasks-per-node={_tasks(shape, request)}")
    if site.gpu_request == "gpus-per-node":
        words.append(f"--gpus-per-node={shape.ranks_per_node}")
    elif site.gpu_request == "gres":
        words.append(f"--gres=gpu:{shape.ranks_per_node}")
    if site.cpus_per_gpu is not None:
        words.append(_cpus(site, shape, request))
    elif site.gpu is not None and shape.ranks_per_node == site.gpus_per_node:
        words.append("--exclusive")
    for option in ("partition", "account", "qos"):
        if (value := getattr(request, option)) is not None:
            words.append(f"--{option}={value}")
    words += [f"--time={request.time}", f"--signal=B:USR1@{request.signal_s}"]
    words.append("--requeue" if mode == "requeue" else "--no-requeue")
    words += ["--open-mode=append", f"--output={str(run).replace('%', '%%')}/{FOLDER}/job-%j.out"]
    return words + list(site.directives) + list(request.options)


def _job_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def _tasks(shape: Shape, request: Request) -> int:
    return shape.ranks_per_node if request.per_rank else 1


def _cpus(site: Site, shape: Shape, request: Request) -> str:
    assert site.cpus_per_gpu is not None
    return f"--cpus-per-task={site.cpus_per_gpu * shape.ranks_per_node // _tasks(shape, request)}"


def _surroundings(site: Site) -> list[str]:
    lines = [f"module load {shlex.quote(module)}" for module in site.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.environment.items()]
    path = python_path()
    return lines + ([f"export PYTHONPATH={shlex.quote(path)}"] if path else [])


def _start(
    site: Site, shape: Shape, request: Request, command: str, overrides: Sequence[str], trust: bool
) -> list[str]:
    """The shell function that runs the step, in one of three forms: one rank, an agent per node, a task per rank."""
    python = shlex.join(python_command("-m", "meshwright", python=site.python))
    if request.container is not None:
        inside = shlex.join(python_command("-m", "meshwright", python="python"))
        python = f"{site.container_command} {shlex.quote(request.container)} {inside}"
    # From 22.05 on, srun no longer inherits a job's --cpus-per-task; repeat it.
    srun = ["srun", "--wait=120", _cpus(site, shape, request) if site.cpus_per_gpu is not None else "--cpu-bind=none"]
    changes = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    train = f"{python} {command}{' --trust' if trust else ''}{changes}"
    lines: list[str] = []
    if shape.ranks > 1 and request.per_rank:
        srun.append(
            '--open-mode=append --output="${run//%/%%}/logs/rank-%t.out" --error="${run//%/%%}/logs/rank-%t.err"'
        )
    elif shape.ranks > 1:
        lines = [
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export master=$head:$((15000 + (SLURM_JOB_ID + 101 * ${SLURM_RESTART_COUNT:-0}) % 16000))",
        ]
        agent = f"--nproc {shape.ranks_per_node} --nodes {shape.nodes} --node-rank $SLURM_NODEID --master $master"
        train = f"bash -c {shlex.quote(f'exec {train} {agent}')}"  # a task knows its own number only at run time
    return [*lines, "start() {", f"  exec {' '.join(srun)} \\", f"    {train}", "}"]
