"""Many ranks on this machine, started and watched by torch's elastic agent."""

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.atomic import atomic_file
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.launch.devices import require_devices
from meshwright.launch.failures import ERROR_FILE, NoMeetingPoint, explain
from meshwright.launch.forked import can_fork, ranks_forked
from meshwright.launch.heartbeat import WATCH
from meshwright.launch.nodes import ALONE, Node
from meshwright.launch.rank_failure import RankFailure
from meshwright.launch.restarts import Restarts, cause_of, last_step
from meshwright.launch.signals import STOPS
from meshwright.launch.watchdog import Watch
from meshwright.launch.worker import LAUNCHER, RUN_FOLDER, STOP_FILE
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import World
from meshwright.python_process import python_command, python_variables
from meshwright.runs import RunFolder
from meshwright.runs.huggingface import fetch_unless_resumed
from meshwright.runs.lifecycle import (
    OnEnd,
    create_folder,
    prepare_data,
    record_failure,
    reporter,
    require_room,
    run_path,
    wait_until_written,
)
from meshwright.runs.outbox import disk_errors
from meshwright.runs.output import log_lost_output
from meshwright.runs.resume import require_resumable
from meshwright.train import require_enough_text

# The agent's own signal handler kills the ranks within 30 s, saved or not; with ours they can finish.
_AGENTS = (signal.SIGHUP, signal.SIGQUIT)


def launch(
    loaded: LoadedJob,
    nproc: int,
    arguments: Sequence[str],
    console: Console,
    on_end: OnEnd = lambda path: None,
    resume: bool = False,
) -> RunFolder:
    """Train a job on `nproc` local ranks that run `python -m meshwright ARGUMENTS`; returns the run's folder.

    Errors are raised before any process starts where possible; with `resume` an existing folder is continued. After a
    failure all ranks restart from the last checkpoint, up to run.max_restarts times. In the end a user error on a rank
    is raised as UserError, a crash as RankFailure, both after every process has exited.
    """
    job = loaded.job
    require_layout(job, nproc)
    require_devices(job, nproc)
    path = run_path(loaded, resume)
    continues = resume and not RunFolder.is_free(path)
    if not continues:
        require_room(job, path, resume, reporter(console))
    else:
        fetch_unless_resumed(job, path, reporter(console))
    corpus = prepare_data(job, console)
    require_enough_text(job, corpus, World(torch.device("cpu")))
    if continues:
        require_resumable(path, job, corpus)
    folder = RunFolder.open(path) if continues else create_folder(loaded, path)
    logs = folder.path / "logs"
    with disk_errors(path):
        logs.mkdir(exist_ok=True)
    log_lost_output(folder, "launcher")
    for left in [*logs.glob("*.error.json"), folder.path / STOP_FILE]:  # left by an attempt that was killed
        left.unlink(missing_ok=True)
    console.print(f"starting {nproc} rank{'s' if nproc > 1 else ''}", highlight=False)
    restarts = Restarts(job)
    try:
        with _signals_kept(folder.path / STOP_FILE):
            _keep_running(folder, restarts, nproc, list(arguments), console, on_end)
    except BaseException as error:
        _end(folder, error, on_end, new=not continues and not restarts.used)
        raise
    _tidy(logs)
    return folder


def _keep_running(
    folder: RunFolder, restarts: Restarts, nproc: int, arguments: list[str], console: Console, on_end: OnEnd
) -> None:
    """Start the ranks until they finish normally, or have failed too often."""
    stop_file = folder.path / STOP_FILE
    while (cause := _attempt(folder, nproc, arguments, restarts)) is not None:
        if stop_file.exists():  # no restart after a stop was requested
            asked = stop_file.read_text()
            folder.event("stop", reason="interrupted", signal=asked, step=max(0, last_step(folder)), error=str(cause))
            wait_until_written(folder)
            on_end(folder.path)
            return
        if not restarts.allows(cause, folder):
            raise cause from None
        wait_s, changes = restarts.next(cause, folder, nproc)
        wait_until_written(folder)
        folder.require_written()  # a new attempt's rows come after these, and could not be written either
        nproc = ranks_of(restarts.job.layout)
        which = f"restart {restarts.used} of {restarts.job.run.max_restarts}"
        shown = f"{which} on {nproc} rank{'s' if nproc > 1 else ''} in {wait_s:.0f} s: {cause_of(cause)}"
        for line in filter(None, (shown, restarts.why_not_smaller)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        arguments += [word for change in changes for word in ("--set", change)]
        arguments += [] if "--resume" in arguments else ["--resume"]
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not stop_file.exists():
            time.sleep(0.05)


def _attempt(folder: RunFolder, nproc: int, arguments: list[str], restarts: Restarts) -> Exception | None:
    """Run the ranks once; returns what made them fail, if they did."""
    watchdog_s, logs = restarts.job.run.watchdog_s, folder.path / "logs"
    watch = Watch(folder, nproc, watchdog_s) if watchdog_s else None
    try:
        with watch or contextlib.nullcontext():
            variables = restarts.variables() | ({} if watch is None else {WATCH: watch.address})
            run_agent(restarts.job, folder.path, nproc, arguments, variables=variables, restart=restarts.used)
    except ChildFailedError as error:
        explained = ended_by(error, logs, nproc)
        return explained if watch is None or watch.hang is None else watch.hang
    except (dist.DistError, RendezvousError) as error:  # a port was taken, or the agent's own store failed
        return NoMeetingPoint("a port of this machine", error)
    finally:
        folder.close()  # the ranks write to the same files
    return None


def ended_by(error: ChildFailedError, logs: Path, ranks: int | None = None) -> UserError | RankFailure:
    """What made some ranks of this machine fail, once all their processes are gone."""
    for failure in error.failures.values():  # processes that a killed rank had started, such as data workers
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(failure.pid, signal.SIGKILL)
    return explain(error.failures, logs, ranks)


def run_under_agent(job: Job, path: Path, nproc: int, arguments: Sequence[str]) -> None:
    """Run `python -m meshwright ARGUMENTS` as this many ranks, without keeping a run; logs go to a folder.

    Failures are raised as by `launch`.
    """
    logs = path / "logs"
    logs.mkdir()
    try:
        run_agent(job, path, nproc, arguments)
    except ChildFailedError as error:
        raise explain(error.failures, logs) from None


def run_agent(
    job: Job,
    path: Path,
    nproc: int,
    arguments: Sequence[str],
    node: Node = ALONE,
    variables: Mapping[str, str] = MappingProxyType({}),
    restart: int = 0,
) -> None:
    """Start this machine's ranks under torch's agent, with some extra variables, and wait for them to end."""
    config = LaunchConfig(
        min_nodes=node.nodes,
        max_nodes=node.nodes,
        nproc_per_node=nproc,
        max_restarts=0,
        **node.rendezvous(),
        monitor_interval=0.1,
        logs_specs=_RankLogs(path, nproc, variables, restart),
        signals_to_handle=",".join(number.name for number in _AGENTS),
    )
    # The agent expands $name in the arguments.
    python, *words = python_command("-m", "meshwright", *(word.replace("$", "$$") for word in arguments))
    started = ranks_forked(job) if can_fork(job) else contextlib.nullcontext()
    kept = _signals_kept(path / STOP_FILE, shared=node.master is not None)
    with _agents_words_in(path / f"logs/agent{node.suffix}.log"), kept, started:
        try:
            elastic_launch(config, python)(*words)
        except SignalException as error:
            raise KeyboardInterrupt from error


def _end(folder: RunFolder, error: BaseException, on_end: OnEnd, *, new: bool) -> None:
    """Close the record of a run whose ranks failed; a new run rejected before it began leaves nothing behind."""
    if new and isinstance(error, UserError) and not folder.events("start"):
        folder.close()
        shutil.rmtree(folder.path)
        return
    _tidy(folder.path / "logs")
    if folder.state() == "running":
        record_failure(folder, error, cause_of(error), on_end)


def _tidy(logs: Path) -> None:
    (logs.parent / STOP_FILE).unlink(missing_ok=True)
    remove_empty(logs.glob("*"))
    with contextlib.suppress(OSError):  # it is not empty, or gone
        logs.rmdir()


def remove_empty(logs: Iterable[Path]) -> None:
    """Remove empty logs; another launcher of the run may do so at the same moment."""
    for log in logs:
        with contextlib.suppress(FileNotFoundError):
            if not log.stat().st_size:
                log.unlink()


class _RankLogs(LogsSpecs):
    """Rank 0 writes to our console, the others to files in the run folder; each gets a file to write its error to."""

    def __init__(self, path: Path, nproc: int, variables: Mapping[str, str], restart: int) -> None:
        super().__init__(log_dir=str(path / "logs"))
        self._variables = {RUN_FOLDER: str(path), LAUNCHER: str(os.getpid()), **python_variables(), **variables}
        self._suffix = f".restart-{restart}" if restart else ""
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self._variables["OMP_NUM_THREADS"] = str(max(1, cores // nproc))

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Every rank's files; the agent passes the variables it will start each rank with."""
        files = LogsDest()
        for local, variables in envs.items():
            rank = int(variables["RANK"])  # of all machines
            base = f"{self.root_log_dir}/rank-{rank}{self._suffix}"
            files.stdouts[local] = f"{base}.out" if rank else ""
            files.stderrs[local] = f"{base}.err" if rank else ""
            files.error_files[local] = f"{base}.error.json"
            variables.update(self._variables)
            variables[ERROR_FILE] = files.error_files[local]
        return files


@contextlib.contextmanager
def _agents_words_in(path: Path) -> Iterator[None]:
    """The agent's log messages are for its developers: send them to a file, not to the user's console."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, before = logging.FileHandler(path), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _signals_kept(stop_file: Path, shared: bool = False) -> Iterator[None]:
    """A signal asks the ranks to stop after the current step; a second one kills them at once.

    With `shared`, another machine may have written the file: all of them are signalled when a cluster ends a run.
    """
    asked = False

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked or (not shared and stop_file.exists()):
            raise KeyboardInterrupt
        asked = True
        # A rank must not read it half-written; a full disk can still create a name when it cannot store text.
        with atomic_file(stop_file) as draft, contextlib.suppress(OSError):
            draft.write_text(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers
        return
    before = {number: signal.getsignal(number) for number in (*STOPS, *_AGENTS)}
    for number in STOPS:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
