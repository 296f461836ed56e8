"""Process-wide settings of a run's device."""

import os
import subprocess
import sys

PROGRAM = """
import threading, torch
from meshwright.job import Job
from meshwright.train import prepare_device
if {prepared}:
    prepare_device(Job(), torch.device("cpu"))
loader = threading.Thread(target=torch.set_num_threads, args=(1,))  # as torch's page-locking thread does for itself
loader.start(), loader.join()
print(torch.get_num_threads())
"""


def threads(prepared: bool) -> str:
    """Compute threads of a new process of which another thread has asked for a single one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM.format(prepared=prepared)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_the_loaders_thread_takes_no_core_from_updates_on_the_host() -> None:
    assert threads(prepared=False) == "1", "torch has changed: what prepare_device does about it may go"
    assert threads(prepared=True) == "2"
