"""The server's handle on the planner process: started when needed, stopped when idle."""

import json
import os
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from meshwright.python_process import python_command, python_variables

_LONGEST_S = 120.0
IDLE_S = 900.0
"""The process is stopped after this long without a request: its tables use as much memory as the rest of the studio."""


class PlannerProcess:
    """Asks `meshwright.studio.worker`; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._asked = 0
        self._idle: threading.Timer | None = None

    def start(self) -> None:
        """Start loading, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer, with `error` if it failed."""
        with self._lock:
            process = self._running()
            self._asked += 1
            number = self._asked
            answer = self._waiting[number] = Future()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"id": number, "question": question}) + "\n")
                process.stdin.flush()
            except OSError:
                return {"error": "the planner's process has ended; ask again"}
        try:
            return answer.result(timeout=_LONGEST_S)
        except TooLate:
            return {"error": f"the planner took longer than {_LONGEST_S:.0f} s; ask for fewer GPUs"}
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    @property
    def pid(self) -> int | None:
        """The process id, if one is running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                python_command("-m", "meshwright.studio.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **python_variables(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the server, which stops it by closing its input
            )
            threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        if self._idle is not None:
            self._idle.cancel()
        self._idle = threading.Timer(IDLE_S, self.close)
        self._idle.daemon = True
        self._idle.start()
        return self._process

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:  # busy with a long search
                self._process.kill()
                self._process.wait()
        self._process = None

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            report = json.loads(line)
            with self._lock:
                waiting = self._waiting.get(report.get("id", 0))
            if waiting is not None:
                waiting.set_result(report["answer"])
        with self._lock:
            if self._process in (process, None):
                for left in self._waiting.values():
                    if not left.done():
                        left.set_result({"error": "the planner's process has ended; ask again"})
