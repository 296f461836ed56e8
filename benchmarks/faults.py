"""What a run survives: faults put into a real run of two ranks, and how long each took to notice and to mend.

    python benchmarks/faults.py table [--out FILE]             every fault of the table, one after the other
    python benchmarks/faults.py random --count 50 [--seed 0]   so many faults, at random, in one run
    sudo python benchmarks/faults.py link [--cut 30]           two "hosts" in network namespaces, the wire cut

Each compares the losses, norms and rates of the finished run with those of a run left alone, bit for bit, and looks for
processes, shared memory and ports left behind. A fault is armed by the rank it strikes: this file is imported first by
every process of a run (`sitecustomize`), or armed in processes that are forked from one that has imported torch.
`detected_s` is from the fault to the launcher's event that names it, `recovered_s` from there until training goes on.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAULTS = "MESHWRIGHT_FAULTS"
"""A file that lists the faults of a run; beside it every fault leaves a file when it strikes, and strikes no more."""
RANKS, WATCHDOG_S = 2, 5.0
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
KINDS = [
    "kill -9 a rank", "exception on a rank", "a rank exits 0 early", "out of memory on a rank", "NaN on a rank",
    "loader worker killed", "SIGSTOP a rank", "a rank stuck outside of collectives",
    "checkpoints turned read-only", "clock +1 h on a rank", "clock -1 h on a rank",
]  # fmt: skip
"""Faults of a rank; the launcher's own are "agent killed" and "rendezvous port taken"."""
HARMLESS = ("checkpoints turned read-only", "clock +1 h on a rank", "clock -1 h on a rank")
"""Nothing needs to restart for these."""


@dataclass(frozen=True)
class Fault:
    """What strikes which rank as it begins a step."""

    number: int
    kind: str
    rank: int
    step: int


def strike(fault: Fault, training: Any) -> None:
    """The fault itself, in the rank's main thread."""
    import torch

    if fault.kind == "kill -9 a rank":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exception on a rank":
        raise ValueError(f"fault {fault.number}")
    elif fault.kind == "a rank exits 0 early":
        os._exit(0)
    elif fault.kind == "out of memory on a rank":
        raise torch.OutOfMemoryError(f"fault {fault.number}")
    elif fault.kind == "NaN on a rank":
        whole = training.engine.accumulate

        def poisoned(*given: Any) -> Any:
            training.engine.accumulate = whole
            return whole(*given) * float("nan")

        training.engine.accumulate = poisoned
    elif fault.kind == "loader worker killed":
        import multiprocessing

        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    elif fault.kind == "SIGSTOP a rank":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "a rank stuck outside of collectives":
        time.sleep(3600)
    elif fault.kind.startswith("clock"):
        hours = 1 if "+" in fault.kind else -1
        honest = time.time
        time.time = lambda: honest() + 3600.0 * hours
    elif fault.kind == "agent killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif fault.kind == "checkpoints turned read-only":
        lock(Path("run/checkpoints"), locked=True)


def lock(folder: Path, *, locked: bool) -> None:
    """Allow or forbid changes to a folder; root is stopped by the immutable attribute alone."""
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i" if locked else "-i", str(folder)], check=True)
    else:
        folder.chmod(0o500 if locked else 0o700)


READ_ONLY_STEPS = 5


def arm() -> None:
    """In a process of a run: make the listed faults happen, each once."""
    listed = os.environ.get(FAULTS)
    if listed is None or "train" not in sys.argv[:3] + sys.orig_argv[:5]:
        return
    faults = [Fault(**row) for row in json.loads(Path(listed).read_text())]
    if "RANK" not in os.environ:
        if any(fault.kind == "rendezvous port taken" for fault in faults):
            take_port(next(fault for fault in faults if fault.kind == "rendezvous port taken"))
        return
    from meshwright.train.loop import Training

    step_of, rank = Training._step, int(os.environ["RANK"])

    def step_with_faults(training: Any, step: int, *given: Any) -> bool:
        for fault in faults:
            if fault.rank == rank and fault.step == step and strikes_now(fault):
                strike(fault, training)
            ends = fault.kind == "checkpoints turned read-only" and fault.rank == rank
            if ends and step == fault.step + READ_ONLY_STEPS and struck_at(Path(listed).parent, fault):
                lock(Path("run/checkpoints"), locked=False)
        return step_of(training, step, *given)

    Training._step = step_with_faults  # type: ignore[method-assign]


def strikes_now(fault: Fault) -> bool:
    """Whether a fault has not struck before; it has from now on."""
    try:
        with (Path(os.environ[FAULTS]).parent / f"struck-{fault.number}").open("x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def struck_at(folder: Path, fault: Fault) -> float | None:
    """When a fault struck."""
    file = folder / f"struck-{fault.number}"
    return float(file.read_text()) if file.exists() else None


def take_port(fault: Fault) -> None:
    """In the launcher: let the first rendezvous meet a port that another program listens on."""
    from meshwright.launch import elastic

    config = elastic.LaunchConfig

    def with_taken_port(**fields: Any) -> Any:
        if strikes_now(fault):
            other = socket.create_server(("127.0.0.1", 0))
            with_taken_port.kept = other  # type: ignore[attr-defined]
            fields |= {"rdzv_endpoint": f"127.0.0.1:{other.getsockname()[1]}"}
            fields |= {"rdzv_configs": {"is_host": True, "timeout": 5}}
        return config(**fields)

    elastic.LaunchConfig = with_taken_port  # type: ignore[assignment,misc]


class Run:
    """One run in a folder of its own, with faults."""

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
        code = f"import sys\nsys.path.append({str(ROOT / 'benchmarks')!r})\nimport faults\nfaults.arm()\n"
        (self.folder / "site/sitecustomize.py").write_text(code)
        command = [sys.executable, "-m", "meshwright", *self.words]
        pipes = {"stdout": (self.folder / "out").open("a"), "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=self.variables(), text=True, **pipes)

    def finish(self, start: Callable[["Run"], Any] = start, timeout_s: float = 600.0) -> int:
        """Run the command until it ends, and again where its launcher was killed."""
        while True:
            process = start(self)
            deadline = time.monotonic() + timeout_s
            while (code := process.poll()) is None:
                assert time.monotonic() < deadline, f"{self.folder} takes too long"
                self.traces.look()
                time.sleep(0.1)
            if code != -signal.SIGKILL:
                return int(code)
            self.wait_for_ranks()

    def wait_for_ranks(self, timeout_s: float = 30.0) -> None:
        """Until no process of the run is left."""
        deadline = time.monotonic() + timeout_s
        while processes_of(self.folder):
            assert time.monotonic() < deadline, processes_of(self.folder)
            time.sleep(0.05)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run/events.jsonl").read_text().splitlines()]

    def numbers(self) -> list[tuple[str, ...]]:
        """What must be equal, as text, so that every bit counts."""
        from meshwright.launch.folder import RunFolder

        rows = [row for row in RunFolder.open(self.folder / "run").metrics() if "loss" in row]
        return [tuple(repr(row[name]) for name in ("step", "loss", "grad_norm", "lr", "tokens")) for row in rows]

    def outcomes(self) -> list[dict[str, Any]]:
        """For every fault: when it was noticed and by what, and when training went on."""
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
    """What the processes of a run hold while it runs, to see afterwards what they left."""

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
    """A process forked from this one that has imported torch, as much of a Popen as torch's agent asks for."""

    def __init__(self, main: Callable[[], None], variables: dict[str, str], out: Any, err: Any, folder: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
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
        os.closerange(3, 1024)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
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
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def fork(run: Run) -> Forked:
    """The run's launcher, whose ranks are forked too; nothing is imported twice."""
    out = (run.folder / "out").open("a")

    def launcher() -> None:
        fork_ranks(run.folder)
        command(run.words)

    return Forked(launcher, run.variables(), out, out, run.folder)


def fork_ranks(folder: Path) -> None:
    """In an agent's process: have it fork its ranks."""
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


def spread(kinds: list[str], first: int = 4, apart: int = 3) -> list[Fault]:
    """Faults one after the other; what the launcher or rank 0 alone can do strikes there."""
    at_zero = ("agent killed", "checkpoints turned read-only")
    return [
        Fault(number, kind, 0 if kind in at_zero else 1, first + apart * number) for number, kind in enumerate(kinds)
    ]


def at_random(count: int, seed: int, kinds: list[str] = KINDS, apart: int = 4) -> list[Fault]:
    """So many faults, on any rank."""
    dice = random.Random(seed)
    faults, step = [], 3
    for number in range(count):
        kind = dice.choice([*kinds, "agent killed"])
        rank = 0 if kind in ("agent killed", "checkpoints turned read-only") else dice.randrange(RANKS)
        faults.append(Fault(number, kind, rank, step))
        # A folder that is read-only must be writable again before the next fault needs a checkpoint of its own.
        step += dice.randint(2, apart) + (READ_ONLY_STEPS if kind.startswith("checkpoints") else 0)
    return faults


def compare(quiet: Run, hurt: Run, start: Callable[[Run], Any]) -> dict[str, Any]:
    """Run both to their ends; what differs, and what was left behind."""
    codes = [quiet.finish(start), hurt.finish(start, timeout_s=3600.0)]
    rows = list(zip(quiet.numbers(), hurt.numbers(), strict=True))
    return {
        "exit_codes": codes,
        "rows_compared": len(rows),
        "rows_that_differ": sum(a != b for a, b in rows),
        "faults": hurt.outcomes(),
        "restarts": sum(event["kind"] == "restart" for event in hurt.events()),
        "rewinds": sum(event["kind"] == "rewind" for event in hurt.events()),
        "left": hurt.traces.left(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "random", "link"))
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", type=float, default=30.0, help="seconds the wire is cut for")
    parser.add_argument("--fork", action="store_true", help="fork the ranks: no imports, so restarts cost less")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.fork:
        import meshwright.launch.elastic
        import meshwright.launch.worker  # noqa: F401  so that forked ranks find it imported
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "link":
            from faults_link import cut_link

            result = cut_link(folder, given.cut, forked=given.fork)
        else:
            kinds = ["rendezvous port taken", *KINDS, "agent killed"]
            faults = spread(kinds, apart=6) if given.what == "table" else at_random(given.count, given.seed)
            steps = faults[-1].step + 10
            quiet, hurt = Run(folder / "quiet", steps, []), Run(folder / "hurt", steps, faults)
            result = compare(quiet, hurt, fork if given.fork else Run.start)
    report = {"date": time.strftime("%Y-%m-%d"), "what": given.what, "forked": given.fork, **result}
    report["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if given.out:
        given.out.write_text(text)
    sys.exit(bool(report["rows_that_differ"]) or any(report["left"].values()))


if __name__ == "__main__":
    main()
