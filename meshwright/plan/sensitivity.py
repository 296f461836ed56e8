"""What a faster machine would bring: each of its parts twice as good, and the best layout searched again on it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from meshwright.errors import UserError
from meshwright.plan.explain import layout_words
from meshwright.plan.machine import Machine, machine_of
from meshwright.plan.question import Question
from meshwright.plan.search import Candidate, search

TIMES = 2.0
_WORTH = 0.02
"""A gain below this is none: predictions err by more."""


@dataclass(frozen=True)
class Gain:
    """The best layout on machines of which one part is twice as good."""

    part: str
    best: Candidate
    faster: float
    """How much more tokens per second: 0.1 is 10%."""
    moved: bool
    """Whether another layout is the best there."""


@dataclass(frozen=True)
class Sensitivity:
    """The best layout as the machines are, and what each part would bring, most first."""

    base: Candidate
    gains: tuple[Gain, ...]

    @property
    def sentence(self) -> str:
        """What to buy."""
        first, last = self.gains[0], self.gains[-1]
        if first.faster < _WORTH:
            return (
                f"no single part, twice as good, would bring {_WORTH:.0%}: fewer or other GPUs cost less for the same"
            )
        useless = f", not {last.part} ({last.faster:+.0%})" if last.faster < min(_WORTH, first.faster / 4) else ""
        return f"{first.part} first ({first.faster:+.0%}){useless}"


def _compute(machine: Machine) -> Machine:
    peak = {name: TIMES * rate for name, rate in machine.gpu.peak.items()}
    measured = machine.measured and machine.measured.faster(compute=TIMES)
    return replace(machine, gpu=machine.gpu.model_copy(update={"peak": peak}), measured=measured)


def _memory_bandwidth(machine: Machine) -> Machine:
    known = machine.gpu.memory_bandwidth_bytes_per_s
    gpu = machine.gpu.model_copy(update={"memory_bandwidth_bytes_per_s": known and TIMES * known})
    return replace(machine, gpu=gpu, measured=machine.measured and machine.measured.faster(bandwidth=TIMES))


def _memory(machine: Machine) -> Machine:
    gpu = machine.gpu.model_copy(update={"memory_gib": TIMES * machine.gpu.memory_gib})
    return replace(machine, gpu=gpu, measured=machine.measured and machine.measured.faster(memory=TIMES))


def _node(machine: Machine) -> Machine:
    return replace(machine, wires=replace(machine.wires, node_bytes_per_s=TIMES * machine.wires.node_bytes_per_s))


def _network(machine: Machine) -> Machine:
    return replace(machine, wires=replace(machine.wires, network_bytes_per_s=TIMES * machine.wires.network_bytes_per_s))


def _latency(machine: Machine) -> Machine:
    wires = machine.wires
    halved = {name: getattr(wires, name) / TIMES for name in ("node_latency_s", "network_latency_s", "start_s")}
    return replace(machine, wires=replace(wires, **halved))


_PARTS: dict[str, Callable[[Machine], Machine]] = {
    "compute": _compute,
    "memory bandwidth": _memory_bandwidth,
    "memory size": _memory,
    "links inside a node": _node,
    "network between nodes": _network,
    "latency of links": _latency,
}


def sensitivity(
    asked: Question, allow: Collection[str] = (), stop: Callable[[], None] = lambda: None
) -> Sensitivity | None:
    """The fastest layout with each part of the machines twice as good, or half the latency; None where nothing fits.

    Everything else stays, the number of GPUs and the batch too. A part that the machines do not have is left out.
    """
    machine = machine_of(asked.machines)
    if machine.on_cpu:
        raise UserError("--sensitivity is about the parts of a GPU and its links; name GPUs with --cluster")

    def fastest(there: Machine) -> Candidate | None:
        stop()
        return next(iter(search(asked.job, there, 1, allow).best), None)

    base = fastest(machine)
    if base is None:
        return None
    gains = []
    for part, better in _PARTS.items():
        if _has(machine, part) and (best := fastest(better(machine))) is not None:
            # What fitted before is never slower there: a search that reached its limit may still have missed it.
            faster = max(0.0, base.prediction.step_s / best.prediction.step_s - 1.0)
            gains.append(Gain(part, best, faster, layout_words(best.job) != layout_words(base.job)))
    return Sensitivity(base, tuple(sorted(gains, key=lambda gain: -gain.faster)))


def _has(machine: Machine, part: str) -> bool:
    """Whether the machines have such a part."""
    return {
        "memory bandwidth": machine.gpu.memory_bandwidth_bytes_per_s is not None,
        "links inside a node": machine.wires.gpus_per_node > 1,
        "network between nodes": machine.nodes > 1,
        "latency of links": machine.gpus > 1,
    }.get(part, True)
