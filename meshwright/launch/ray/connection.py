"""The connection to a Ray cluster; what is wrong with it becomes one sentence."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import meshwright
from meshwright.errors import UserError
from meshwright.reading import Unfit, read_text

NAMESPACE = "meshwright"
"""Ray's name for the actors of all our runs, so that they can be found from any program."""
_INSTALL = "pip install 'meshwright[ray]'"
_ANSWER_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NoCluster(UserError):
    """The cluster could not be asked; the state of its runs is then unknown, which is not the same as ended."""


def connect(address: str | None = None, ship: bool = False) -> Any:
    """Ray itself, connected to a cluster: the one at an address, in RAY_ADDRESS, or started on this machine.

    A program that is connected already stays so. With `ship` the cluster's machines get a copy of this package.
    """
    try:
        import ray
    except ImportError:
        raise UserError(f"Ray is not installed here; install it with {_INSTALL}") from None
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, here):
            raise UserError(f"this program is connected to the cluster at {here}, not to {address}; leave it out")
        return ray
    asked = address or os.environ.get("RAY_ADDRESS") or "auto"
    if asked != "auto":
        _require_answer(asked)
    elif (current := _current_cluster()) is not None:
        asked = current
    package = Path(meshwright.__file__).parent
    environment = {"py_modules": [str(package)]} if ship else None
    try:
        # Ray puts the working directory on the path of the processes that run our actors.
        with contextlib.chdir(package.parent):
            ray.init(
                address=asked,
                namespace=NAMESPACE,
                runtime_env=environment,
                log_to_driver=False,
                logging_level="CRITICAL",
            )
    except ConnectionError as error:
        shown = "no cluster runs on this machine" if asked == "auto" else f"--address {asked} does not answer"
        raise NoCluster(
            f"{shown} ({_first_line(error)}); start one with `ray start --head`, or give --address HOST:PORT on one of "
            "its machines"
        ) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise UserError(f"{_mismatch(str(error))}; install the cluster's versions here") from None
    return ray


def answers(address: str) -> bool:
    """Whether a cluster still runs at an address."""
    try:
        _require_answer(address)
    except NoCluster:
        return False
    return True


def _current_cluster() -> str | None:
    """The cluster last started on this machine: its address in Ray's file, which outlives a crash."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        address = read_text(file).strip() or "(empty)"
    except FileNotFoundError:
        return None
    except (OSError, Unfit) as error:
        raise NoCluster(f"{file} cannot be read ({error}); give --address HOST:PORT, or remove that file") from None
    try:
        _require_answer(address)
    except UserError as error:
        reason = str(error).partition(";")[0].removeprefix("--address ")
        raise NoCluster(
            f"{reason}, and {file} names it as the cluster of this machine; start one with `ray start --head`, give "
            "--address HOST:PORT, or remove that file"
        ) from None
    return address


def _require_answer(address: str) -> None:
    """Reject an address where nothing listens; Ray itself would try for minutes."""
    if "://" in address:
        raise UserError(
            f"--address {address} is not HOST:PORT; submit on a machine of the cluster, for example with `ray job "
            "submit -- meshwright submit …`"
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"--address {address} is not HOST:PORT; give the one that `ray start --head` printed")
    asked = host.strip("[]")
    if asked in _LOOPBACK:
        from ray.util import get_node_ip_address

        asked = get_node_ip_address()  # which Ray connects to instead
    try:
        with socket.create_connection((asked, int(port)), timeout=_ANSWER_S) as connection:
            ours = os.environ.get("RAY_USE_TLS") == "1" or _speaks_grpc(connection)
    except OSError as error:
        place = "" if asked == host else f", which Ray takes as {asked}:{port},"
        raise NoCluster(
            f"--address {address}{place} does not answer ({error.strerror or error}); give the address that `ray "
            "start --head` printed, and check that the cluster runs"
        ) from None
    if not ours:
        raise NoCluster(f"--address {address} is not of a Ray cluster; give the one that `ray start --head` printed")


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether another program's port answers as Ray's does: to HTTP/2's opening and an empty frame of settings, with
    settings of its own."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    return connection.recv(9)[3:4] == b"\4"


def _mismatch(text: str) -> str:
    """Ray's report of several lines as one sentence."""
    versions = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith(("Ray:", "Pyt"))]
    if len(versions) < 4:
        return " ".join(text.split()).rstrip(".")
    theirs, ours = versions[:2], versions[2:4]
    return f"the cluster has Ray {theirs[0]} on Python {theirs[1]}, this machine Ray {ours[0]} on Python {ours[1]}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".")
