"""Worker processes that die: told where training waits for their data, and nowhere else.

torch's handler of their deaths raises in the middle of whatever this process does at that moment, be it the writing of
a checkpoint or of an error. So it stands only while the next step is asked for; deaths before that are asked after.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.torch_private.processes import raise_if_a_worker_failed

_torchs_handler: Any = None
"""torch sets it once in a process, when the first workers start."""


@contextmanager
def workers_starting() -> Iterator[None]:
    """Inside, workers are started; this process's own handler of their deaths stays as it was."""
    global _torchs_handler
    before = signal.getsignal(signal.SIGCHLD)
    yield
    now = signal.getsignal(signal.SIGCHLD)
    if now is not before and threading.current_thread() is threading.main_thread():
        _torchs_handler = now
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


@contextmanager
def deaths_told() -> Iterator[None]:
    """Inside, where the next step is waited for, the death of a worker is raised at once, and an earlier one first."""
    raise_if_a_worker_failed()
    if _torchs_handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, _torchs_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
