"""One rank from start to end: find its device, connect to the others, train, exit."""

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.checkpoint import Lease
from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.launch.devices import with_own_device
from meshwright.launch.failures import NoMeetingPoint, leave, table_errors_explained, write_failure
from meshwright.launch.rank_failure import RankFailure
from meshwright.launch.signals import stop_on_signal
from meshwright.launch.watchdog import signs_of_life
from meshwright.layout import ranks_of, require_layout, with_values
from meshwright.parallel import World, join_world
from meshwright.ranks import ALONE, Place, own_place
from meshwright.runs import RunFolder
from meshwright.runs.auto import record_values, values_of_auto
from meshwright.runs.callbacks import Callbacks, StopAsked
from meshwright.runs.huggingface import fetch_unless_resumed
from meshwright.runs.lifecycle import (
    Finished,
    OnEnd,
    Stop,
    create_folder,
    made_for_backup,
    prepare_data,
    print_headline,
    record_end,
    record_failure,
    reporter,
    reports,
    require_room,
    run_path,
)
from meshwright.runs.output import log_lost_output
from meshwright.runs.rank_zero import SharedRefusal, from_rank_zero, on_rank_zero
from meshwright.runs.resume import Found, begin, find_checkpoint, require_same_run
from meshwright.runs.rewinds import Rewinds
from meshwright.runs.traces import TRACES
from meshwright.train import (
    Activity,
    Rewind,
    Start,
    TraceSteps,
    choose_device,
    memory_errors_explained,
    prepare_device,
    require_enough_text,
    require_nvtx,
    set_up_trainer,
    training_loader,
)

RUN_FOLDER = "MESHWRIGHT_RUN_FOLDER"
"""Set for ranks that our own launcher started: the run folder it created for them."""
LAUNCHER = "MESHWRIGHT_LAUNCHER"
"""Set for them, too: the launcher's process id."""
STOP_FILE = "logs/stop"
"""In that folder: contains a signal's name once the launcher was asked to stop."""


_LOOK_S = 1.0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Set by torch's agents: how often they have restarted these ranks."""


def run_job(
    loaded: LoadedJob,
    console: Console,
    place: Place | None = None,
    on_end: OnEnd = lambda path: None,
    resume: bool = False,
    dtype: torch.dtype | None = None,
    callbacks: Callbacks | None = None,
    trace: TraceSteps | None = None,
) -> Finished:
    """Train a job in this process, alone or as one of its ranks; errors are raised before anything is written where
    possible.

    Only rank 0 prepares, prints and records; each rank saves its shard. With `resume`, or if an agent has restarted the
    ranks, an existing run folder is continued. However the run ends, `on_end` is called with its folder (to write the
    report, which is in a higher room). `dtype` overrides the formats of masters and computation. `callbacks` are called
    on rank 0. Every rank writes a trace of the steps in `trace`.
    """
    callbacks = callbacks or Callbacks()
    _require_ranks(loaded.job, place)
    launched_in = os.environ.get(RUN_FOLDER) if place else None
    if place is not None:
        faulthandler.enable(2)  # a crash inside a library leaves the stack in the rank's log
        # Before a rank waits for others, whose patience a large download would outlast.
        given = launched_in or loaded.job.run.folder
        fetch_unless_resumed(loaded.job, Path(given) if given else None, reporter(console))
    activity = Activity()
    with signs_of_life(loaded.job.run.watchdog_s, place or ALONE, activity) as life:
        job = with_own_device(loaded.job, place) if place else loaded.job
        device = choose_device(job)
        if trace is not None and trace.nvtx:
            require_nvtx(device)
        activity.at("connecting to the other ranks")
        with _launcher_needed(launched_in):
            world = _met(job, device) if place else World(device)
        life.met()
        activity.at("preparing data and looking for a checkpoint")
        job, corpus, folder, start = _open(loaded, job, world, console, launched_in, resume or _restarts(place) > 0)
        prepare_device(job, device)
        start = replace(start, activity=activity, dtype=dtype)
        life.found(start.lease.run)
        if folder is not None:
            log_lost_output(folder, "rank-0")
        rewinds = Rewinds(folder, job, world, console)
        try:
            with _stop(launched_in) as asked:
                stop = StopAsked(asked, callbacks)
                while True:
                    try:
                        to_all = reports(folder, job, corpus, start, console, callbacks)
                        with to_all as to, memory_errors_explained(job, world), table_errors_explained(job, activity):
                            loader = training_loader(job, corpus, world, start.position, start.cursors())
                            with closing(loader):
                                loader.start()  # its workers read ahead while the model is built
                                trainer = set_up_trainer(job, corpus, world, start, *to)
                                if trace is not None:
                                    trainer.trace(trace, start.lease.run / TRACES)
                                outcome = trainer.run(stop, loader)
                        break
                    except Rewind as rewind:
                        bad = (rewind.step, rewind.position)
                    del trainer  # frees its weights before new ones are allocated
                    start = rewinds.start_again(start, *bad)
                record_end(folder, world, outcome, stop, activity)
        except BaseException as error:
            if folder is not None and launched_in is None:  # a launcher knows better which rank was the cause
                record_failure(folder, error, f"{type(error).__name__}: {error}", on_end)
            raise
        if folder is not None:
            on_end(folder.path)
    # Only now: after a failure the connections must stay open until this rank has reported it.
    if place and dist.is_initialized():
        dist.destroy_process_group()
    return Finished(start.lease.run, outcome, stop.signal)


@contextlib.contextmanager
def _launcher_needed(launched_in: str | None) -> Iterator[None]:
    """While inside, this rank ends if its launcher has: it would wait for half an hour for peers that never start."""
    if launched_in is None:
        yield
        return
    is_connected = threading.Event()

    def watch() -> None:
        while not is_connected.wait(_LOOK_S):
            if _launcher_is_gone():
                write_failure(RankFailure("the launcher ended before this rank was connected", None, ""))
                leave(1)

    watcher = threading.Thread(target=watch, name="launcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_connected.set()
        watcher.join()


def _launcher_is_gone() -> bool:
    parent = str(os.getppid())
    return os.environ.get(LAUNCHER, parent) != parent


def _met(job: Job, device: torch.device) -> World:
    """The world, once all ranks are connected; a port taken by another program is not the job's fault."""
    try:
        return join_world(job, device)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):  # a consequence of a peer that died
            raise
        place = f"MASTER_ADDR:MASTER_PORT = {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise NoMeetingPoint(place, error) from None


def run_quietly(loaded: LoadedJob, resume: bool = False, dtype: torch.dtype | None = None) -> Finished:
    """Train a job without output as the rank this process is under torchrun, or alone if it is none."""
    return run_job(loaded, Console(quiet=True), own_place(), resume=resume, dtype=dtype)


def _require_ranks(job: Job, place: Place | None) -> None:
    if place is None and (needed := ranks_of(job.layout)) > 1:
        raise UserError(f"layout needs {needed} ranks; add --nproc {needed} or start it with torchrun")
    try:
        require_layout(job, place.size if place else 1)
    except UserError as error:
        raise (SharedRefusal(str(error)) if place else error) from None


def _restarts(place: Place | None) -> int:
    """How often torch's agent has restarted these ranks."""
    return int(os.environ.get(RESTARTS, "0")) if place else 0


def _open(
    loaded: LoadedJob, job: Job, world: World, console: Console, launched_in: str | None, resume: bool
) -> tuple[Job, Corpus, RunFolder | None, Start]:
    """Rank 0 prepares data and folder, then the others find the data in the cache and all look for a checkpoint; the
    job's fields that are `auto` get their values."""

    def prepare_all() -> tuple[Corpus, Path, bool]:
        path = Path(launched_in) if launched_in else run_path(loaded, resume)
        continues = resume and not RunFolder.is_free(path)
        if launched_in is None and not continues:
            require_room(job, path, resume, reporter(console))
        corpus = prepare_data(job, console)
        require_enough_text(job, corpus, world)
        continues = continues or (launched_in is None and made_for_backup(loaded, path, resume))
        return corpus, path, continues

    prepared = on_rank_zero(world, prepare_all)
    corpus = prepared[0] if prepared is not None else prepare_data(job, console)
    path, continues = from_rank_zero(world, prepared[1:] if prepared is not None else (Path(), False))
    found = find_checkpoint(path, world, job.checkpoint.backup_to) if continues else Found()
    values = from_rank_zero(world, values_of_auto(job, world.device, found.checkpoint))
    job = with_values(job, values)

    def open_folder() -> tuple[RunFolder, Start]:
        if found.checkpoint is not None:
            require_same_run(job, corpus, found.checkpoint)
        folder = RunFolder.open(path) if launched_in or continues else create_folder(loaded, path)
        if world.size > 1 and launched_in is None and (restart := int(os.environ.get(RESTARTS, "0"))):
            folder.event("restart", restart=restart, cause=_last_failure(folder), ranks=world.size)
        record_values(folder, values)
        start = begin(folder, job, found, console)
        folder.require_written()
        print_headline(job, corpus, world, folder, console)
        return folder, start

    opened = on_rank_zero(world, open_folder)
    attempt = from_rank_zero(world, opened[1].lease.attempt if opened is not None else 0)
    if opened is not None:
        return job, corpus, *opened
    return job, corpus, None, Start(Lease(path, attempt), found.checkpoint)


def _last_failure(folder: RunFolder) -> str:
    """What the ranks recorded before their agent restarted them."""
    report = folder.events("start", "hang", "stop")
    if not report or report[-1]["kind"] == "start":
        return "a rank died without an error message"
    last = report[-1]
    return str(last.get("error") or f"ranks {last.get('missing')} hung; see {last.get('report')}")


@contextlib.contextmanager
def _stop(launched_in: str | None) -> Iterator[Stop]:
    if launched_in is None:
        with stop_on_signal() as stop:
            yield stop
    else:
        # A scheduler may send its warning to every process of a job; only the launcher acts on it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        yield _LauncherStop(Path(launched_in) / STOP_FILE)


class _LauncherStop:
    """True once the launcher was asked to stop, or is gone.

    A file rather than a signal: the agent ends the peers of a dead rank with SIGTERM, which must work at once, and
    its handling of other signals leaves no time to save large weights.
    """

    def __init__(self, file: Path) -> None:
        self.signal: str | None = None
        self._file = file

    def __call__(self) -> bool:
        if self.signal is None:
            if _launcher_is_gone():
                self.signal = "launcher died"
            else:
                with contextlib.suppress(OSError):  # missing, or the disk does not respond
                    self.signal = self._file.read_text().strip() or signal.SIGTERM.name
        return self.signal is not None
