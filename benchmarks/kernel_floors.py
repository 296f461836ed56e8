"""A profiled step's kernels, each with the least time that its work needs: read from a trace of torch's profiler.

Products (matrix multiplications) are grouped by shape, everything else by name. A floor is

products    the best time measured for that shape over all layouts of its operands
attention   its FLOPs (causal half; 2.5 forwards in backward) at the rate of the best large product
optimizer   bytes of masters, moments, gradients and working copies, cross-entropy those of the logits read and written
others      bytes of all arguments, each read or written once, at the measured rate of a copy

A kernel whose arguments are larger than what it touches (an embedding's table) cannot take less than it took: there the
floor is the time itself. A kernel of which nothing is known has no floor; it counts as its own floor.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.measure.kernels import kind_of

ITEM_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4}
ITEM_BYTES |= {"c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "unsigned char": 1, "bool": 1, "signed char": 1}
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are a GPU's."""

Shape = tuple[int, int, int]
"""Rows, columns and inner size of a product."""


@dataclass(frozen=True)
class Rates:
    """What this device was measured to do."""

    bytes_per_s: float
    flops_per_s: float
    """Of the best large product in bf16."""
    products_s: Mapping[Shape, float]
    """The best time of each product of the step, by shape."""


@dataclass(frozen=True)
class Launch:
    """One kernel's run on the device, with the operation that launched it."""

    name: str
    seconds: float
    began: float
    operation: str = ""
    number: int = 0
    """Of the operation: several kernels may be of one, as a product that is split and summed."""
    dims: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """All launches of one kernel, or of products of one shape, in a step."""

    group: str
    name: str
    calls: float
    seconds: float
    floor_s: float | None = None
    shape: Shape | None = None
    bytes: float = 0.0
    """Of all arguments of all its launches in a step."""

    @property
    def excess_s(self) -> float:
        """What it takes above its floor."""
        return self.seconds - self.least_s

    @property
    def least_s(self) -> float:
        """The floor; its time if there is none."""
        return self.seconds if self.floor_s is None else min(self.floor_s, self.seconds)


def read_trace(path: Path) -> list[Launch]:
    """What ran on the device; in a trace without one, the CPU's operations without those they call."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    by_id = {event["args"].get("External id"): event for event in operations}
    on_device = [event for event in events if event.get("cat") in DEVICE_WORK]
    if not on_device:
        return [_launch(event, event) for event in _alone(operations)]
    return [_launch(event, by_id.get(event["args"].get("External id"))) for event in on_device]


def _alone(operations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations, each less those that it calls."""
    found, open_ones = list[dict[str, Any]](), list[dict[str, Any]]()
    for event in sorted(operations, key=lambda one: (one["tid"], one["ts"], -one["dur"])):
        own = {**event}
        while open_ones and not _contains(open_ones[-1], event):
            open_ones.pop()
        if open_ones:
            open_ones[-1]["dur"] -= event["dur"]
        own["until"] = event["ts"] + event["dur"]
        open_ones.append(own)
        found.append(own)
    return found


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return bool(outer["tid"] == inner["tid"] and inner["ts"] < outer["until"])


def _launch(event: dict[str, Any], operation: dict[str, Any] | None) -> Launch:
    given = {} if operation is None else operation["args"]
    return Launch(
        event["name"],
        event["dur"] / 1e6,
        event["ts"] / 1e6,
        "" if operation is None else operation["name"],
        given.get("External id", 0),
        tuple(given.get("Input Dims", ())),
        tuple(given.get("Input type", ())),
    )


def busy_s(launches: Iterable[Launch]) -> float:
    """Time in which anything ran on the device."""
    total, until = 0.0, -math.inf
    for launch in sorted(launches, key=lambda one: one.began):
        ended = launch.began + launch.seconds
        total += max(0.0, ended - max(until, launch.began))
        until = max(until, ended)
    return total


def shape_of(launch: Launch) -> Shape | None:
    """Sizes of a product, of several at once as one with all their rows; None if it is none."""
    if kind_of(launch.name) == "copies":  # it may clear its workspace first
        return None
    operation = launch.operation.rpartition("::")[2]
    places = {"mm": (0, 1), "_scaled_mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}.get(operation)
    if places is None or len(launch.dims) <= places[1]:
        return None
    first, second = launch.dims[places[0]], launch.dims[places[1]]
    if not (first and second and first[-1] == second[-2]):
        return None
    return math.prod(first[:-1]), second[-1], first[-1]


def bytes_of(launch: Launch) -> float:
    """Of all the tensors that an operation was given."""
    total = 0.0
    for dims, kind in zip(launch.dims, launch.types, strict=False):
        if kind in ITEM_BYTES and dims:
            total += math.prod(dims) * ITEM_BYTES[kind]
    return total


def group_of(launch: Launch, shape: Shape | None, vocabulary: int) -> str:
    """What a kernel computes."""
    name, kind = launch.name.lower(), kind_of(launch.name)
    if shape is not None:
        return "head and loss" if vocabulary in shape else "products"
    if "cross_entropy" in name or "nll" in name or ("softmax" in name and "attention" not in name):
        return "head and loss"
    if kind in ("attention", "products", "copies", "communication", "optimizer"):
        return kind
    if "swiglu" in name or "silu" in name or "sigmoid" in name:
        return "swiglu"
    if "embedding" in name or "embedding" in launch.operation:
        return "embedding"
    return "norm and residual" if "rsqrt" in name or "norm" in name else "other elementwise"


def rows_of(launches: Iterable[Launch], steps: int, vocabulary: int) -> list[Row]:
    """Launches of some steps, merged per step by what they compute."""
    found: dict[tuple[str, str, Shape | None], list[Launch]] = {}
    for launch in launches:
        shape = shape_of(launch)
        name = launch.operation if shape is not None else launch.name
        found.setdefault((group_of(launch, shape, vocabulary), name, shape), []).append(launch)
    return [
        Row(
            group,
            name if shape is None else f"{name} {shape[0]} × {shape[2]} × {shape[1]}",
            len(alike if shape is None else {one.number for one in alike}) / steps,
            sum(one.seconds for one in alike) / steps,
            shape=shape,
            bytes=sum(map(bytes_of, {one.number: one for one in alike}.values())) / steps,
        )
        for (group, name, shape), alike in found.items()
    ]


def with_floors(rows: Sequence[Row], rates: Rates, known_s: Mapping[str, float]) -> list[Row]:
    """Rows with their floors, the largest excess first.

    `known_s` are floors of all rows together whose group is, or whose name contains, a word; they share it by time.
    """
    of_word = {word: [row for row in rows if _is(row, word)] for word in known_s}
    found = []
    for row in rows:
        word = next((word for word in known_s if _is(row, word)), None)
        floor: float | None = None
        if row.shape is not None:
            best = rates.products_s.get(row.shape)
            flops_s = 2.0 * math.prod(row.shape) / rates.flops_per_s
            floor = row.calls * (flops_s if best is None else best)
        elif word is not None:
            floor = known_s[word] * row.seconds / sum(one.seconds for one in of_word[word])
        elif row.bytes:
            floor = row.bytes / rates.bytes_per_s
        found.append(replace(row, floor_s=floor))
    return sorted(found, key=lambda row: -row.excess_s)


def _is(row: Row, word: str) -> bool:
    return row.shape is None and (row.group == word or word in row.name)


def groups_of(rows: Iterable[Row], idle_s: float) -> dict[str, dict[str, float]]:
    """Seconds, floor and excess by group, with the device's idle time, the largest excess first."""
    found: dict[str, dict[str, float]] = {"gaps of the host": {"seconds": idle_s, "floor_s": 0.0, "excess_s": idle_s}}
    for row in rows:
        group = found.setdefault(row.group, {"seconds": 0.0, "floor_s": 0.0, "excess_s": 0.0})
        group["seconds"] += row.seconds
        group["floor_s"] += row.least_s
        group["excess_s"] += row.excess_s
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["excess_s"]))
