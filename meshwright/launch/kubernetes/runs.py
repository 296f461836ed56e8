"""A run on Kubernetes while it lives: submit, state in one word, logs, cancel; the cluster itself is the record."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.kubernetes.kubectl import Place
from meshwright.launch.kubernetes.manifests import FOLDER, KIND, STEPS
from meshwright.launch.kubernetes.request import KINDS, Request
from meshwright.launch.slurm import NoAnswer, Status
from meshwright.launch.slurm.status import Word
from meshwright.python_process import python_command
from meshwright.reading import printable

_OBJECTS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "rayjob": "rayjobs.ray.io",
}
_ENDS: dict[str, Word] = {
    "Completed": "done",
    "Succeeded": "done",
    "Failed": "failed",
    "Suspended": "pending",
    "SUCCEEDED": "done",  # a RayJob's jobStatus
    "FAILED": "failed",
    "STOPPED": "cancelled",
}


def submit(request: Request, text: str) -> str:
    """Apply a run's manifest; returns what it is in the cluster. If the cluster rejects it, nothing is left."""
    place, resource = Place(request.name, request.namespace), _OBJECTS[request.kind]
    if place.get(f"{resource}/{request.name}") is not None:
        raise UserError(
            f"{request.kind}/{request.name} exists already, running or ended; run meshwright cancel {place}, then "
            "submit again to continue"
        )
    new = place.get(f"configmap/{request.name}-job") is None
    try:
        place.call("apply", "-f", "-", text=text)
    except BaseException:
        with contextlib.suppress(UserError):
            left = [f"{resource}/{request.name}", *([f"configmap/{request.name}-job"] if new else [])]
            place.call("delete", *left, "--ignore-not-found", "--wait=false")
        raise
    return f"{request.kind}/{request.name}"


@dataclass(frozen=True)
class _Record:
    """What a run's ConfigMap says about it."""

    kind: str
    folder: str
    steps: int

    @property
    def resource(self) -> str:
        return _OBJECTS[self.kind]


def _record(place: Place) -> _Record:
    found = place.get(f"configmap/{place.name}-job")
    if found is None:
        where = f"namespace {place.namespace}" if place.namespace else "kubectl's namespace"
        raise UserError(f"{place}: there is no such run in {where}; give what meshwright submit printed")
    notes = found.get("metadata", {}).get("annotations") or {}
    kind, folder, steps = notes.get(KIND), notes.get(FOLDER), str(notes.get(STEPS))
    if kind not in KINDS or not isinstance(folder, str) or not steps.isdecimal():
        raise UserError(f"{place}: the ConfigMap {place.name}-job is not of a run of meshwright; submit the job again")
    return _Record(kind, folder, int(steps))


def status_of(reference: str) -> Status:
    """The state of a run; its steps are read in its first pod while that runs."""
    place = Place.parse(reference)
    record = _record(place)
    found = place.get(f"{record.resource}/{place.name}")
    if found is None:
        why = f"its {record.kind} is gone; submit its job again to continue"
        return Status(str(place), "cancelled", why, 0, record.steps, 0, None, "")
    pods = _pods(place)
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    state, why = _ended(found)
    restarts = int(found.get("status", {}).get("restarts") or 0)
    step = record.steps if state == "done" else 0
    if state == "failed" and any(_killed_for_memory(pod) for pod in pods):
        state, why = "oom", f"a pod ran out of memory; {why}"
    if state is None and running and len(running) == len(pods):
        state = "running"
        step, why = _progress(place, record, pods)
    elif state is None or state == "pending":
        state = "requeued" if restarts and state is None else "pending"
        why = why or _waiting(pods)
    nodes = ",".join(sorted({str(pod.get("spec", {}).get("nodeName", "")) for pod in running}))
    job = f"{record.kind}/{place.name}"
    return Status(str(place), state, printable(why), step, record.steps, restarts, job, nodes)


def logs(reference: str, rank: int | None, follow: bool) -> Iterator[str]:
    """What the first pod wrote, rank 0's output in it; another rank's log is read on the volume, in that pod."""
    place = Place.parse(reference)
    record = _record(place)
    words = ["--follow"] if follow else []
    if record.kind == "rayjob" and not rank:
        yield from place.stream(
            "logs", f"job/{place.name}", "--tail=-1", *words
        )  # the submitter, which KubeRay names so
        return
    first = _first(_pods(place))
    if first is None:
        raise UserError(f"{place} has no log yet: none of its pods exists; wait, or see meshwright status {place}")
    name = first["metadata"]["name"]
    if not rank:
        yield from place.stream("logs", name, "--all-containers", "--tail=-1", *words)
        return
    yield from place.stream(*_inside(first, "logs", record.folder, "--rank", str(rank), *words))


def cancel(reference: str, wait_s: float) -> Status:
    """Delete what starts a run's pods: each gets SIGTERM and its grace period to save, and none restarts.

    A run on Ray is cancelled in its head first: Ray does not pass the signal on to the ranks.
    """
    place = Place.parse(reference)
    record = _record(place)
    if record.kind == "rayjob" and (head := _first(_pods(place))) is not None:
        with contextlib.suppress(NoAnswer):  # a cluster that is gone already has nothing to save
            place.call(*_inside(head, "cancel", record.folder, "--wait", f"{wait_s:g}"), wait_s=wait_s + 60)
    place.call(
        *("delete", f"{record.resource}/{place.name}", "--ignore-not-found"),
        *("--cascade=foreground", "--wait=true", f"--timeout={max(1, round(wait_s))}s"),
        wait_s=wait_s + 60,
    )
    return status_of(reference)


def _ended(found: dict[str, Any]) -> tuple[Word | None, str]:
    """How a run ended or why it is held back, according to its conditions; None while it runs or waits for pods."""
    status = found.get("status") or {}
    if (word := _ENDS.get(str(status.get("jobStatus")))) is not None:
        return word, str(status.get("message") or "Ray reports " + str(status["jobStatus"]))
    if status.get("jobDeploymentStatus") in ("Failed", "Suspended"):
        return _ENDS[status["jobDeploymentStatus"]], str(status.get("message") or status["jobDeploymentStatus"])
    for condition in reversed(status.get("conditions") or []):
        word = _ENDS.get(str(condition.get("type")))
        if condition.get("status") == "True" and word is not None:
            done = "all steps are done" if word == "done" else ""
            return word, done or str(condition.get("message") or condition.get("reason") or condition["type"])
    return None, ""


def _pods(place: Place) -> list[dict[str, Any]]:
    found = place.get("pods", "-l", f"app.kubernetes.io/instance={place.name}") or {}
    return [pod for pod in found.get("items") or [] if isinstance(pod, dict)]


def _first(pods: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The pod that rank 0 is in: of the newest attempt, if there are several."""

    def is_first(pod: dict[str, Any]) -> bool:
        about = pod.get("metadata", {})
        marks = {**(about.get("annotations") or {}), **(about.get("labels") or {})}
        if "ray.io/node-type" in marks:
            return bool(marks["ray.io/node-type"] == "head")
        number = marks.get("batch.kubernetes.io/job-completion-index", marks.get("training.kubeflow.org/replica-index"))
        return number == "0" and marks.get("training.kubeflow.org/replica-type", "master") == "master"

    found = sorted(pods, key=lambda pod: str(pod.get("metadata", {}).get("creationTimestamp", "")))
    return next((pod for pod in reversed(found) if is_first(pod)), found[-1] if found else None)


def _inside(pod: dict[str, Any], *words: str) -> list[str]:
    """A command of ours, run in a pod with the Python that its ranks run with."""
    container = pod["spec"]["containers"][0]
    python = (container.get("command") or ["python"])[0]
    command = python_command("-m", "meshwright", *words, python=python)
    return ["exec", pod["metadata"]["name"], "-c", container["name"], "--", *command]


def _progress(place: Place, record: _Record, pods: list[dict[str, Any]]) -> tuple[int, str]:
    first = _first(pods)
    assert first is not None
    try:
        told = json.loads(place.call(*_inside(first, "status", record.folder, "--json")))
        return int(told["step"]), f"step {int(told['step'])} of {record.steps}"
    except (UserError, ValueError, KeyError, TypeError) as error:
        return 0, f"its steps cannot be read in {first['metadata']['name']} ({error})"


def _waiting(pods: list[dict[str, Any]]) -> str:
    """Why a pod does not run yet, as the scheduler or the machine says it."""
    for pod in pods:
        status = pod.get("status", {})
        for container in status.get("containerStatuses") or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("message") or waiting.get("reason"):
                return str(waiting.get("message") or waiting["reason"])
        for condition in status.get("conditions") or []:
            if condition.get("status") == "False" and condition.get("message"):
                return str(condition["message"])
    return "no reason given by Kubernetes yet"


def _killed_for_memory(pod: dict[str, Any]) -> bool:
    states = [
        (container.get(name) or {}).get("terminated") or {}
        for container in pod.get("status", {}).get("containerStatuses") or []
        for name in ("state", "lastState")
    ]
    return any(state.get("reason") == "OOMKilled" for state in states)
