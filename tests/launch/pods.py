"""Runs what a pod's container would run, here: the kubelet's and the operator's part is played by this file.

Played, not real: the host name of the first pod is 127.0.0.1, the port a free one, `python` this Python, and the
ConfigMap's job file is in a folder of the test. The volume is a folder that the profile names as its mount.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.launch.kubernetes.pod import JOB_FILE

ROOT = str(Path(__file__).parents[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def expanded(word: str, variables: dict[str, str]) -> str:
    """A word of a container's command as the kubelet starts it: $(NAME) replaced if it is set, $$ a dollar."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        word,
    )


def container_start(
    container: dict[str, Any], given: dict[str, str], job_file: Path
) -> tuple[list[str], dict[str, str]]:
    """The words and variables with which a container starts; `given` are set by whoever made the pod."""
    variables = {one["name"]: expanded(one["value"], given) for one in container["env"]} | given
    words = [expanded(word, variables) for word in container["command"]]
    assert words[0] == "python"
    return [sys.executable, *(str(job_file) if word == JOB_FILE else word for word in words[1:])], variables


class Processes:
    """Commands that run side by side, as the nodes of a cluster do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str], variables: dict[str, str]) -> None:
        """Start one; its output goes to a file."""
        name = f"{len(self.running)}.out"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        with (self.folder / name).open("ab") as out:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**inherited, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.running.append(process)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for something that the processes do."""
        deadline = time.monotonic() + 240
        while not done():
            assert time.monotonic() < deadline and all(one.poll() is None for one in self.running), self.output()
            time.sleep(0.05)

    def codes(self) -> list[int]:
        """Their exit codes, once all have ended."""
        ended = [one.wait(timeout=240) for one in self.running]
        self.running = []
        return ended

    def output(self) -> str:
        """What they wrote, for a failed test."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Some processes, all gone at the end."""
    made = Processes(folder)
    try:
        yield made
    finally:
        for one in made.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
