"""An actor on one machine of the cluster: it starts the ranks of one bundle under torch's agent, and ends them."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from meshwright.launch.ray.record import FOLDER, Submission
from meshwright.launch.ray.status import STOP_FILE
from meshwright.launch.signals import STOP_FILE as STOP_FILE_VARIABLE
from meshwright.python_process import python_command, python_variables
from meshwright.version import VERSION


class Facts(NamedTuple):
    """What a supervisor must know of a machine before ranks start there."""

    address: str
    free_port: int
    error: str | None
    """Why ranks cannot start here."""


class Host:
    """One bundle's ranks; runs in a process of Ray's, so it imports no torch and forks nothing itself."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._agent: subprocess.Popen[bytes] | None = None

    def facts(self) -> Facts:
        """This machine's address, with a port that is free now."""
        from ray.util import get_node_ip_address

        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return Facts(get_node_ip_address(), port, self._error())

    def _error(self) -> str | None:
        asked, here = self._submission, socket.gethostname()
        if asked.version != VERSION:
            return f"{here} has meshwright {VERSION}, the run was submitted with {asked.version}; install that one"
        if not (Path(asked.run) / "job.resolved.json").is_file():
            return f"{here} does not see run.folder = {asked.run}; put it on a disk that all machines share"
        if not Path(asked.folder).is_dir():
            return f"{here} does not see {asked.folder}, where the run was submitted; submit it from a shared disk"
        return None

    def start(self, attempt: int, place: tuple[int, int, str], ranks: int) -> None:
        """Start this machine's ranks: `place` is its number, how many there are, and where they connect."""
        asked, (number, hosts, master) = self._submission, place
        words = ["train", asked.run, "--resume", "--nproc", str(ranks)]
        words += ["--nodes", str(hosts), "--node-rank", str(number), "--master", master]
        words += ["--trust"] * asked.trust
        variables = dict(os.environ)
        # Ray's own value is for one process with all of the bundle's CPUs.
        variables.pop("OMP_NUM_THREADS", None)
        if not asked.gpus:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # The supervisor has removed an earlier attempt's; one that is there now was meant for this attempt.
        variables[STOP_FILE_VARIABLE] = str(Path(asked.run) / STOP_FILE)
        variables |= python_variables()
        log = Path(asked.run) / FOLDER / f"attempt-{attempt}{f'.host-{number}' if number else ''}.out"
        with log.open("ab") as out:
            self._agent = subprocess.Popen(
                python_command("-m", "meshwright.launch.ray.child", str(os.getpid()), *words),
                cwd=asked.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code of the ranks here, once they have ended."""
        assert self._agent is not None
        return self._agent.poll()

    def kill(self) -> None:
        """End whatever was started here at once."""
        if self._agent is None:
            return
        for pid in (*_descendants(self._agent.pid), self._agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agent.wait()


def _descendants(pid: int) -> list[int]:
    """All processes that a process has started, theirs before them: ranks and data workers have their own sessions."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            own, _, rest = entry.read_text().partition(" (")
            parents.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(own))
    found: list[int] = []
    for child in parents.get(pid, []):
        found += [*_descendants_in(parents, child), child]
    return found


def _descendants_in(parents: dict[int, list[int]], pid: int) -> list[int]:
    return [one for child in parents.get(pid, []) for one in (*_descendants_in(parents, child), child)]
