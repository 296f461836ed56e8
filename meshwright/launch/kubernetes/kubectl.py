"""Call kubectl and parse its output; its errors become one sentence."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.slurm import NoAnswer

PREFIX = "kubernetes:"
"""What a run on Kubernetes begins with where a run folder is expected."""
_TIMEOUT_S = 60.0
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Place:
    """A run on Kubernetes: its name and namespace."""

    name: str
    namespace: str | None = None

    @classmethod
    def parse(cls, reference: str) -> "Place":
        """From `kubernetes:NAME` or `kubernetes:NAMESPACE/NAME`."""
        namespace, slash, name = reference.removeprefix(PREFIX).rpartition("/")
        if not _NAME.fullmatch(name) or (slash and not _NAMESPACE.fullmatch(namespace)):
            raise UserError(f"{reference} is not kubernetes:NAMESPACE/NAME; give what meshwright submit printed")
        return cls(name, namespace or None)

    def __str__(self) -> str:
        return f"{PREFIX}{self.namespace}/{self.name}" if self.namespace else f"{PREFIX}{self.name}"

    def call(self, *words: str, text: str | None = None, wait_s: float = _TIMEOUT_S) -> str:
        """The output of a kubectl command in the run's namespace; `text` is its input."""
        command = self._command(*words)
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=wait_s, check=False)
        except FileNotFoundError:
            raise _absent() from None
        except subprocess.TimeoutExpired:
            raise NoAnswer(
                f"kubectl {words[0]} did not answer within {wait_s:.0f} s; check the cluster with kubectl get nodes"
            ) from None
        if done.returncode:
            raise NoAnswer(f"kubectl {words[0]} failed: {_report(done.stderr, done.returncode)}; fix what it names")
        return done.stdout

    def get(self, *words: str) -> dict[str, Any] | None:
        """An object, or a list of some; None if it does not exist."""
        text = self.call("get", *words, "--ignore-not-found", "-o", "json")
        if not text.strip():
            return None
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswer(f"kubectl get {words[0]} did not print JSON; check which kubectl is on the PATH")
        return found

    def stream(self, *words: str) -> Iterator[str]:
        """What a command prints, as it prints it."""
        try:
            process = subprocess.Popen(
                self._command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except FileNotFoundError:
            raise _absent() from None
        with process:
            assert process.stdout is not None and process.stderr is not None
            try:
                yield from process.stdout
                error = process.stderr.read()
                process.wait()
            finally:
                if process.poll() is None:  # nobody reads on
                    process.terminate()
        if process.returncode:
            raise NoAnswer(f"kubectl {words[0]} failed: {_report(error, process.returncode)}; fix what it names")

    def _command(self, *words: str) -> list[str]:
        return ["kubectl", *(("--namespace", self.namespace) if self.namespace else ()), *words]


def _absent() -> NoAnswer:
    return NoAnswer(
        "kubectl is not on this machine; install it and choose a cluster with kubectl config use-context, or write the "
        "manifest with --write FILE and apply it elsewhere"
    )


def _report(text: str, code: int) -> str:
    """An error message in one line."""
    lines = [line.removeprefix("error: ").strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line) or f"exit code {code}"
