"""Runs what a pod's container would run, here: the kubelet's and the operator's part is played by this file.

Played, not real: the host name of the first pod is 127.0.0.1, the port a free one, and the ConfigMap's job file is in a
folder of the test. `python -m meshwright` is a fork of this process, which has imported it already. The volume is a
folder that the profile names as its mount.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import meshwright.cli
import meshwright.launch.elastic  # with torch, which no node then has to import
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
    return [str(job_file) if word == JOB_FILE else word for word in words], variables


class Nodes:
    """Commands of ours that run side by side, as on the nodes of a cluster, each a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []

    def start(self, words: list[str], variables: dict[str, str]) -> None:
        """Start `python -P -m meshwright …`; its output goes to a file."""
        assert words[:4] == ["python", "-P", "-m", "meshwright"]
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            _become(words[3:], variables, self.folder, f"{len(self.pids)}.out")
        self.pids.append(pid)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for something that all of them must be running for."""
        deadline = time.monotonic() + 240
        while not done():
            assert time.monotonic() < deadline, self.output()
            for pid in self.pids:
                assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, self.output()
            time.sleep(0.05)

    def codes(self) -> list[int]:
        """Their exit codes, once all have ended."""
        pids, self.pids = self.pids, []
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

    def output(self) -> str:
        """What they wrote, for a failed test."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))


def _become(words: list[str], variables: dict[str, str], folder: Path, out: str) -> None:
    """Make this fork what a container would start, and end with its exit code."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        os.environ.clear()
        os.environ.update(inherited | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"} | variables)
        sys.argv = words
        meshwright.cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Nodes without a process; what runs on them at the end is killed."""
    made = Nodes(folder)
    try:
        yield made
    finally:
        for pid in made.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        made.codes()
