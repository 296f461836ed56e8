"""Runs with faults: as a user starts them or forked, their results, and what they left behind."""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fault_kinds import FAULTS, HARMLESS, RANKS, Fault, arm, struck_at

ROOT = Path(__file__).parents[1]
WATCHDOG_S = 5.0
JOB = """
[model]
preset = "tiny-llama"
layers = 1
width = 32
heads = 2
kv_heads = 1
ffn_width = 32
[data]
sources = ["builtin:synthetic"]
workers = 1
[batch]
sequence_length = 16
global_batch = 4
micro_batch = 2
[layout]
dp_replicate = 2
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 2
[run]
device = "cpu"
folder = "run"
on_bad_step = "rewind"
"""


class Run:
    """One run in its own folder, with faults."""

    def __init__(self, folder: Path, steps: int, faults: list[Fault], settings: list[str] | None = None) -> None:
        self.folder, self.steps, self.faults, self.traces = folder, steps, faults, Traces(folder)
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(JOB)
        (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        restarts = sum(fault.kind not in HARMLESS for fault in faults)
        settings = [*(settings or []), f"run.steps={steps}", f"run.max_restarts={restarts}"]
        settings += [f"run.watchdog_s={WATCHDOG_S}"] if faults else []
        words = [word for setting in settings for word in ("--set", setting)]
        self.words = ["train", "job.toml", *words, "--nproc", str(RANKS), "--resume"]

    def variables(self) -> dict[str, str]:
        """The environment of the run's processes."""
        path = os.pathsep.join([str(self.folder / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return {**kept, "PYTHONPATH": path, FAULTS: str(self.folder / "faults.json"), "OMP_NUM_THREADS": "1"}

    def start(self) -> "subprocess.Popen[str]":
        """The command, as a user would give it."""
        (self.folder / "site").mkdir(exist_ok=True)
        code = f"import sys\nsys.path.append({str(ROOT / 'benchmarks')!r})\nimport fault_kinds\nfault_kinds.arm()\n"
        (self.folder / "site/sitecustomize.py").write_text(code)
        command = [sys.executable, "-m", "meshwright", *self.words]
        pipes = {"stdout": (self.folder / "out").open("a"), "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=self.variables(), text=True, **pipes)

    def finish(self, start: Callable[["Run"], Any] = start, timeout_s: float = 600.0) -> int:
        """Run the command until it ends, and again if its launcher was killed."""
        while True:
            process = start(self)
            deadline = time.monotonic() + timeout_s
            while (code := process.poll()) is None:
                assert time.monotonic() < deadline, f"{self.folder} took too long"
                self.traces.look()
                time.sleep(0.1)
            if code != -signal.SIGKILL:
                return int(code)
            self.wait_for_ranks()

    def wait_for_ranks(self, timeout_s: float = 30.0) -> None:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + timeout_s
        while processes_of(self.folder):
            assert time.monotonic() < deadline, processes_of(self.folder)
            time.sleep(0.05)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run/events.jsonl").read_text().splitlines()]

    def numbers(self) -> list[tuple[str, ...]]:
        """What must be equal, as text, so that every bit counts."""
        from meshwright.runs.folder import RunFolder

        rows = [row for row in RunFolder.open(self.folder / "run").metrics() if "loss" in row]
        return [tuple(repr(row[name]) for name in ("step", "loss", "grad_norm", "lr", "tokens")) for row in rows]

    def outcomes(self) -> list[dict[str, Any]]:
        """For every fault: when it was detected and by what, and when training continued."""
        return [self._outcome(fault) for fault in self.faults]

    def _outcome(self, fault: Fault) -> dict[str, Any]:
        struck = struck_at(self.folder, fault)
        row: dict[str, Any] = {
            "fault": fault.kind,
            "rank": fault.rank,
            "step": fault.step,
            "struck": struck is not None,
        }
        noticed_by = {"NaN on a rank": "bad_step", "checkpoints turned read-only": "checkpoint_failed"}
        noticed_by |= {"agent killed": "stop", "SIGSTOP a rank": "hang", "a rank stuck outside of collectives": "hang"}
        if struck is None or fault.kind.startswith("clock"):
            return row
        later = [event for event in self.events() if seconds(event) > struck - 0.002]
        kind = noticed_by.get(fault.kind, "restart")
        noticed = next((event for event in later if event["kind"] == kind), None)
        if noticed is None:
            return row
        row["detected_s"] = round(seconds(noticed) - struck, 2)
        told = next((event for event in later if event["kind"] == "restart"), {}) if kind == "hang" else noticed
        row["cause"] = told.get("cause") or told.get("error") or told.get("signal") or f"loss {told.get('loss')}"
        if kind in ("restart", "bad_step", "hang"):
            began = next(event for event in later if event["kind"] == "start" and seconds(event) > seconds(noticed))
            row["recovered_s"] = round(seconds(began) - seconds(noticed), 2)
        return row


def seconds(event: dict[str, Any]) -> float:
    """An event's time."""
    return datetime.fromisoformat(event["time"]).timestamp()


class Traces:
    """The resources of a run's processes while it runs, to check afterwards what they left behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: set[int] = set()
        self._sockets: set[str] = set()

    def look(self) -> None:
        """Remember the run's processes and the sockets they listen on."""
        pids = [int(line.split()[0]) for line in processes_of(self._folder)]
        self._pids |= set(pids)
        held = {link for pid in pids for link in _descriptors(pid)}
        self._sockets |= {inode for inode in _listening() if f"socket:[{inode}]" in held}

    def left(self) -> dict[str, list[str]]:
        """Processes, ports and shared memory that outlived the run."""
        shared = Path("/dev/shm")
        names = [entry.name for entry in shared.iterdir()] if shared.is_dir() else []
        return {
            "processes": processes_of(self._folder),
            "ports": [port for inode, port in _listening().items() if inode in self._sockets],
            "shared_memory": [name for name in names if any(str(pid) in name.split("_") for pid in self._pids)],
        }


def processes_of(folder: Path) -> list[str]:
    """Processes that work in a folder, whoever started them: launchers, ranks, readers of data."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and (entry / "cwd").readlink() == folder.resolve() and int(entry.name) != os.getpid():
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
    return found


def _descriptors(pid: int) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(entry.readlink()))
    return links


def _listening() -> dict[str, str]:
    """Inode → port of every TCP socket that listens on this machine."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9]: str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A"}


class Forked:
    """A process forked from this one that has imported torch, as much of a Popen as torch's agent needs."""

    def __init__(self, main: Callable[[], None], variables: dict[str, str], out: Any, err: Any, folder: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self._folder = folder
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                self._become(variables, out, err, folder)
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    @staticmethod
    def _become(variables: dict[str, str], out: Any, err: Any, folder: Path) -> None:
        os.setsid()
        os.chdir(folder)
        for target, file in ((1, out), (2, err)):
            if file is not None:
                os.dup2(file.fileno(), target)
        # Emptied, not closed: what owns them here may close them later, when the number is another's.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2:
                os.dup2(nothing, int(name))
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2)  # in its ranks too
        os.environ.clear()
        os.environ.update(variables)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self._show_stacks()
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _show_stacks(self) -> None:
        """Where the process and its ranks are: in what they write errors to, and here."""
        for line in processes_of(self._folder):
            with contextlib.suppress(OSError):
                os.kill(int(line.split()[0]), signal.SIGUSR2)
        time.sleep(2.0)
        for file in (self._folder / "err", self._folder / "out", *self._folder.glob("run*/logs/*")):
            if file.is_file():
                lines = file.read_text(errors="replace").splitlines()
                found = [number for number, line in enumerate(lines) if "most recent call first" in line]
                shown = [line for number in found for line in lines[number : number + 9]]  # the innermost frames
                print(f"{file}:", *(shown or lines[-9:]), sep="\n", file=sys.stderr)


def fork(run: Run) -> Forked:
    """The run's launcher, forked from this process; nothing is imported twice."""
    out = (run.folder / "out").open("a")
    return Forked(lambda: command(run.words), run.variables(), out, out, run.folder)


def fork_ranks(folder: Path) -> None:
    """In the process of an agent that is not our launcher's: make it fork its ranks too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def forked_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        words = list(args[args.index("meshwright") + 1 :])
        return Forked(lambda: command(words), env, handler._stdout, handler._stderr, folder)

    SubprocessHandler._popen = forked_rank  # type: ignore[method-assign,assignment]


def command(words: list[str]) -> None:
    """`meshwright WORDS` in this process, faults armed."""
    from meshwright.cli import main

    sys.argv = ["meshwright", *words]
    arm()
    main()
