"""A run compared with its prediction: the step, its parts and the peak of memory, term by term where both are known."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.hardware import completed, find_gpu, gpu_by_key, profile_of
from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan.compute import head_work
from meshwright.plan.host import BACKWARD, FORWARD
from meshwright.plan.kernels import device_of
from meshwright.plan.machine import machine_of
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED

_FORWARD = ("forward products", "forward attention", "forward elementwise", FORWARD)
_BACKWARD = ("backward products", "backward attention", "backward elementwise", "recomputation", BACKWARD)


@dataclass(frozen=True)
class Term:
    """One thing that was predicted and measured."""

    name: str
    unit: str
    """s, bytes or tokens/s."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1.0


def cluster_here(job: Job, device: str, devices: int) -> Cluster | None:
    """The machine a run was on, by its device's name; None if neither the table nor a profile has it."""
    gpu = find_gpu(device)
    key = gpu.key if gpu else (CPU if device == "CPU" and profile_of(CPU, devices) else None)
    if key is None:
        return None
    meant = _meant(job.cluster, key)
    within = meant.gpus_per_node if meant.gpus_per_node > 1 else devices
    nodes = max(1, devices // within)
    return meant.model_copy(update={"gpu": key, "nodes": nodes, "gpus_per_node": devices // nodes})


def _meant(cluster: Cluster, key: str) -> Cluster:
    """A job's section if it describes machines with this GPU; otherwise it does not apply here."""
    try:
        whole = completed(cluster)
        here = whole.gpu is None or whole.gpu == key or gpu_by_key(whole.gpu).key == key
    except UserError:  # a profile that is elsewhere, a GPU only another machine has a profile of
        return Cluster()
    return whole if here else Cluster()


def compare_with_plan(
    job: Job,
    device: str,
    devices: int,
    step_s: float,
    peak_bytes: float | None,
    parts_s: Mapping[str, float] | None = None,
) -> list[Term]:
    """Measurements next to their predictions; empty if the machine or the job cannot be predicted.

    `parts_s` are seconds of a step by the names of `bench`: forward, loss, backward, reduce, optimizer.
    """
    cluster = cluster_here(job, device, devices)
    if cluster is None or job.model.file is not None or job.layout.schedule == "pipedream":
        return []
    try:
        prediction = predict(job, cluster)
    except UserError:
        return []
    tokens = job.tokens_per_step
    terms = [
        Term("step", "s", prediction.step_s, step_s),
        Term("throughput", "tokens/s", tokens / prediction.step_s, tokens / step_s),
    ]
    if peak_bytes and not prediction.on_cpu:
        terms.append(Term("peak memory", "bytes", prediction.fullest.allocated, peak_bytes))
    elif peak_bytes and prediction.fullest.outside:  # of a CPU's process the whole is measured
        terms.append(Term("peak memory", "bytes", prediction.fullest.device, peak_bytes))
    expected = _parts(job, cluster, prediction) if job.layout.pp == 1 else {"optimizer": prediction.phases["optimizer"]}
    measured = dict(parts_s or {})
    if devices == 1 and "optimizer" in measured:
        measured["optimizer"] += measured.get("reduce", 0.0)  # nothing is reduced: this is the norm, part of the update
    for name, seconds in measured.items():
        if expected.get(name) and seconds > 0:
            terms.append(Term(name, "s", expected[name], seconds))
    return terms


def _parts(job: Job, cluster: Cluster, prediction: Prediction) -> dict[str, float]:
    """A step's parts as timers see them: the head computes its gradients in the forward, as part of the loss."""
    machine = machine_of(cluster)
    device = device_of(machine.gpu, machine.rates, job.precision.format, machine.measured)
    head = head_work(job, device, MESHWRIGHT_COMPILED if job.run.compiles else MESHWRIGHT)
    phases = prediction.phases
    return {
        "forward": sum(phases.get(name, 0.0) for name in _FORWARD) - job.accumulation * head.forward,
        "loss": job.accumulation * (head.forward + head.backward),
        "backward": sum(phases.get(name, 0.0) for name in _BACKWARD) - job.accumulation * head.backward,
        "optimizer": phases["optimizer"],
    }
