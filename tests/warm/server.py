"""Runs `meshwright` and `python` in forks of a process that has imported torch, for tests that run many of them.

python server.py SOCKET      prints a line once it listens; ends with its standard input

There `builtin:stdlib` is one package of the standard library: to prepare all of it takes longer than most commands.
"""

import array
import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

# torch imports these on first use, which every command would do anew.
import torch._dynamo
import torch._inductor.utils
from stdlib import narrow_stdlib

import meshwright.cli
import meshwright.launch.elastic
import meshwright.measure
import meshwright.plan
import meshwright.studio
import meshwright.verify
from meshwright.train.garbage import frozen

LARGEST_BYTES = 1 << 20
FROZEN = contextlib.ExitStack()
atexit.register(FROZEN.close)


def serve(path: str) -> dict[str, Any] | None:
    """Fork for every request; returns it in the process that is to run it, and None in the server at its end."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    FROZEN.enter_context(frozen())  # else a command's first collection visits, and so copies, all that was imported
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while listening in select.select([listening, sys.stdin], [], [])[0]:
        client = listening.accept()[0]
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            return answer(client)
        client.close()
    return None


def answer(client: socket.socket) -> dict[str, Any]:
    """Fork the command and tell the client how it ends; a client that goes first takes the command with it."""
    text, descriptors, _, _ = socket.recv_fds(client, LARGEST_BYTES, 3)
    request: dict[str, Any] = json.loads(text)
    command = os.fork()
    if command == 0:
        client.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return request
    ended = os.pidfd_open(command)
    if client.fileno() in select.select([ended, client.fileno()], [], [])[0]:
        os.killpg(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(array.array("i", [code]).tobytes())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Make this fork what a new program would be; its standard streams are the client's already."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # as the import sets it, before a fork takes it back
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww")
    )


def start(words: list[str], python: Path) -> None:
    """The command with these words; after `--python` the command as a module, code, or a script.

    The processes that a script or a measurement starts are forked from the server too.
    """
    if words[:1] in (["--python"], ["bench"], ["tune"]):
        sys.executable = str(python)
    if words[:1] != ["--python"]:
        words = ["--python", "-m", "meshwright", *words]
    rest = words[2:] if words[1] == "-P" else words[1:]
    if rest[:2] == ["-m", "meshwright"]:
        sys.argv = ["meshwright", *rest[2:]]
        meshwright.cli.main()
    elif rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    elif rest[0] == "-":
        sys.argv = rest
        sys.path.insert(0, "")
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).parent))
        runpy.run_path(rest[0], run_name="__main__")


def run(words: list[str], python: Path) -> int:
    """The program's exit code, once its threads and what it registered have ended as at the end of a program."""
    code = 0
    try:
        start(words, python)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        code = 1 if isinstance(stop.code, str) else int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    narrow_stdlib()
    if (request := serve(sys.argv[1])) is not None:
        become(request)
        code = run(request["words"], Path(sys.argv[1]).with_name("python-warm"))
        os._exit(code)  # to take all that the server imported apart would copy it first: 0.4 s for each command
    else:
        Path(sys.argv[1]).unlink()
