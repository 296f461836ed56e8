"""One rank's life: find its device, meet the others, train, part."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job, LoadedJob
from meshwright.launch.devices import with_own_device
from meshwright.launch.folder import RunFolder
from meshwright.launch.gather import SharedRefusal, on_rank_zero
from meshwright.launch.local import (
    Finished,
    OnEnd,
    Stop,
    create_folder,
    prepare_data,
    print_headline,
    record_failure,
    require_room,
    run_path,
    train_in,
)
from meshwright.launch.ranks import Place
from meshwright.launch.signals import stop_on_signal
from meshwright.parallel import World, join_world, require_layout
from meshwright.train import choose_device, prepare_device, require_enough_text

RUN_FOLDER = "MESHWRIGHT_RUN_FOLDER"
"""Set for ranks that our own launcher started: the folder it made for them."""
STOP_FILE = "logs/stop"
"""In that folder: holds a signal's name once the launcher was asked to stop."""


def run_rank(loaded: LoadedJob, place: Place, console: Console, on_end: OnEnd = lambda path: None) -> Finished:
    """Train a job as one of its ranks; rank 0 alone prepares, prints, records and saves."""
    try:
        require_layout(loaded.job, place.size)
    except UserError as error:
        raise SharedRefusal(str(error)) from None
    launched_in = os.environ.get(RUN_FOLDER)
    job = with_own_device(loaded.job, place)
    device = choose_device(job)
    prepare_device(job, device)
    world = join_world(job, device)
    corpus, folder = _open(loaded, job, world, console, launched_in)
    try:
        with _stop(launched_in) as stop:
            outcome = train_in(folder, job, corpus, world, console, stop)
    except BaseException as error:
        if folder is not None and launched_in is None:  # a launcher knows better which rank was the cause
            record_failure(folder, f"{type(error).__name__}: {error}", on_end)
        raise
    if folder is not None:
        on_end(folder.path)
    # Only now: after a failure the connections must outlive what this rank has to say about it.
    dist.destroy_process_group()
    return Finished(folder.path if folder else run_path(loaded), outcome)


def _open(
    loaded: LoadedJob, job: Job, world: World, console: Console, launched_in: str | None
) -> tuple[Corpus, RunFolder | None]:
    """Rank 0 prepares data and folder, then the others find the data in the cache."""

    def prepare_all() -> tuple[Corpus, RunFolder]:
        path = Path(launched_in) if launched_in else run_path(loaded)
        if launched_in is None:
            require_room(job, path)
        corpus = prepare_data(job, console)
        require_enough_text(job, corpus, world)
        folder = RunFolder.open(path) if launched_in else create_folder(loaded, path)
        print_headline(job, corpus, world, folder, console)
        return corpus, folder

    prepared = on_rank_zero(world, prepare_all)
    return prepared if prepared is not None else (prepare_data(job, console), None)


@contextlib.contextmanager
def _stop(launched_in: str | None) -> Iterator[Stop]:
    if launched_in is None:
        with stop_on_signal() as stop:
            yield stop
    else:
        yield _LauncherStop(Path(launched_in) / STOP_FILE)


class _LauncherStop:
    """Becomes true when the launcher was asked to stop, or is gone.

    A file rather than a signal: the agent ends the peers of a dead rank with SIGTERM, which must work at once, and
    what it does with other signals leaves no time to save large weights.
    """

    def __init__(self, file: Path) -> None:
        self.signal: str | None = None
        self._file, self._launcher = file, os.getppid()

    def __call__(self) -> bool:
        if self.signal is None:
            if os.getppid() != self._launcher:
                self.signal = "launcher died"
            elif self._file.exists():
                self.signal = self._file.read_text()
        return self.signal is not None
