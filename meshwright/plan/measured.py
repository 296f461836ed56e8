"""A calibration profile as the planner uses it: how much longer than its formula a product takes near measured shapes,
attention by the fastest kernel, and rates of memory, host and links."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import Profile
from meshwright.hardware.profile import Collective
from meshwright.plan.communication import Wires
from meshwright.plan.operations import Operations

_NEAR = 6
"""Measured shapes that a figure is interpolated from, and more where several are equally near."""
_FAR = 1.5
"""Doublings of a size beyond the measured range after which a figure is reported as a guess."""

_LARGE = 2**20
"""Bytes from which a message's rate counts more than its latency."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cloud:
    """Positive values at points of several sizes; between them by the nearest, each by its distance in doublings."""

    points: Floats
    values: Floats

    @staticmethod
    def of(rows: Iterable[tuple[tuple[float, ...], float]]) -> "Cloud | None":
        """From (sizes, value) pairs; None where there is none."""
        pairs = list(rows)
        if not pairs:
            return None
        return Cloud(np.log2(np.array([sizes for sizes, _ in pairs])), np.log(np.array([value for _, value in pairs])))

    def at(self, *sizes: float) -> float:
        """The value near these sizes, never outside the measured range."""
        distance = ((self.points - np.log2(np.array(sizes))) ** 2).sum(axis=1)
        # All that are as near as the last of them: which of two equals numpy takes depends on the processor.
        last = np.partition(distance, min(_NEAR, len(distance)) - 1)[min(_NEAR, len(distance)) - 1]
        nearest = distance <= last * (1 + 1e-9)
        weights = 1.0 / (distance[nearest] + 1e-3) ** 1.5
        return float(np.exp((weights * self.values[nearest]).sum() / weights.sum()))

    def doublings_to(self, *sizes: float) -> float:
        """How far the nearest measured point is in its farthest size."""
        return float(np.abs(self.points - np.log2(np.array(sizes))).max(axis=1).min())


class Measured:
    """One device's profile; the same object for the same profile, so that results can be cached by it."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._attention = _attention_clouds(profile)
        self._main_attention = profile.attentions[0].dtype if profile.attentions else None
        self._products: dict[tuple[str, str], Cloud | None] = {}
        self.on_cpu = profile.on_cpu
        self.operations = Operations(profile) if profile.on_cpu and profile.operations else None
        """What a CPU's profile says of the operations between products; None for a GPU, and in profiles of before."""
        largest = max(profile.copies, key=lambda one: one.moved_bytes)
        self.copy_bytes_per_s = largest.moved_bytes / largest.seconds
        update = max(profile.updates, key=lambda one: one.parameters, default=None)
        self.update_s_per_parameter = None if update is None else update.seconds / update.parameters
        self._losses: dict[str | None, Cloud | None] = {
            dtype: Cloud.of(
                ((one.rows, one.vocabulary), one.seconds / (one.rows * one.vocabulary))
                for one in profile.losses
                if one.dtype == dtype
            )
            for dtype in (None, *{one.dtype for one in profile.losses if one.dtype})
        }
        """By the format of the logits; of the device's main one under None."""
        self.compute = self.bandwidth = 1.0
        """How many times as fast as measured arithmetic and memory are taken to be."""
        self._faster: dict[tuple[float, float, float], Measured] = {}

    def faster(self, *, compute: float = 1.0, bandwidth: float = 1.0, memory: float = 1.0) -> "Measured":
        """The same device with arithmetic, memory bandwidth or memory size so many times as large."""
        key = compute, bandwidth, memory
        if key not in self._faster:
            other = copy(self)
            other._faster = {}
            other.compute, other.bandwidth = compute * self.compute, bandwidth * self.bandwidth
            other.profile = self.profile.model_copy(update={"memory_gib": memory * self.profile.memory_gib})
            other.copy_bytes_per_s = bandwidth * self.copy_bytes_per_s
            if self.update_s_per_parameter is not None:
                other.update_s_per_parameter = self.update_s_per_parameter / bandwidth
            self._faster[key] = other
        return self._faster[key]

    def product_factors(
        self, dtype: str, kind: str, sizes: Sequence[tuple[int, int, int]], formula: Callable[[Any], Any]
    ) -> Floats:
        """Seconds measured near each shape over what the formula of the device as measured gives there; 1 where the
        format was not measured."""
        if (dtype, kind) not in self._products:
            samples = [one for one in self.profile.products if one.dtype == dtype and one.kind == kind]
            points = [(one.rows, one.columns, one.inner) for one in samples]
            by_formula = formula(np.array(points)) if points else ()
            self._products[dtype, kind] = Cloud.of(
                (point, one.seconds / expected)
                for point, one, expected in zip(points, samples, by_formula, strict=True)
            )
        cloud = self._products[dtype, kind]
        if cloud is None and kind == "weight sum":
            return self.product_factors(dtype, "weight", sizes, formula)
        return np.array([1.0 if cloud is None else cloud.at(*size) for size in sizes])

    def unmeasured(self, dtype: str, forwards: Iterable[tuple[int, int, int]]) -> list[str]:
        """Of some projections' forwards, a description of those whose format or size is far from the measured ones."""
        cloud = Cloud.of(
            ((one.rows, one.columns, one.inner), one.seconds)
            for one in self.profile.products
            if one.dtype == dtype and one.kind == "forward"
        )
        if cloud is None:
            return [f"products in {dtype}: not in the profile"]
        far = [sizes for sizes in forwards if cloud.doublings_to(*sizes) > _FAR]
        return [
            f"products of {' × '.join(map(str, sizes))}: far from what the profile measured"
            for sizes in dict.fromkeys(far)
        ]

    def lacks(self, dtype: str) -> str:
        """What a CPU's profile has of fp32 but not of another format, in words; empty if nothing."""
        if dtype in ("fp32", "tf32"):
            return ""
        profile = self.profile
        formats: dict[str, set[str | None]] = {
            "operations": {one.dtype for one in profile.operations},
            "attention": {one.dtype for one in profile.attentions},
            "the loss": {one.dtype for one in profile.losses},
        }
        return ", ".join(name for name, known in formats.items() if dtype not in known)

    def attention_s(
        self,
        dtype: str,
        forward_flops: float,
        head_dim: int,
        sequence: int,
        heads: float,
        groups: float,
        *,
        masked: bool = False,
    ) -> tuple[float, float] | None:
        """Forward and backward of the kernel that takes least for both; None where none was measured.

        `heads` are all that run at once, those of every sequence. With a mask a CPU has its own figures, and a GPU the
        one kernel that takes masks. In a format that was not measured as in the device's main one.
        """
        taken = []
        known = dtype if any(form == dtype for form, *_ in self._attention) else self._main_attention
        for (form, kernel, grouped), (forward, backward) in self._attention.items():
            usable = kernel.endswith("masked") == masked if self.on_cpu else kernel.startswith("flash") or not masked
            if form == known and grouped == (groups > 1) and usable:
                sizes = (head_dim, sequence, max(1.0, heads))
                flops = forward_flops / self.compute
                taken.append((flops / forward.at(*sizes), 2.5 * flops / backward.at(*sizes)))
        return min(taken, key=sum, default=None)

    def loss_s(self, dtype: str, rows: int, vocabulary: int) -> float | None:
        """The loss and its gradient from logits, in a format that was not measured as in the main one; None without."""
        cloud = self._losses.get(dtype) or self._losses[None]
        return None if cloud is None else cloud.at(rows, vocabulary) * rows * vocabulary / self.bandwidth

    def wires(self, wires: Wires, given: set[str]) -> tuple[Wires, set[str]]:
        """Links as all-reduces showed them, `node` and `network`, but for those `given`; and which were measured."""
        rows = [one for one in self.profile.collectives if one.kind == "all-reduce"]
        known = set()
        if "node" not in given and (link := _link([one for one in rows if one.nodes == 1])):
            scatter = _scatter(self.profile) if self.on_cpu else 1.0
            wires, known = replace(wires, node_latency_s=link[0], node_bytes_per_s=link[1], scatter=scatter), {"node"}
        if "network" not in given and (link := _link([one for one in rows if one.nodes > 1])):
            wires, known = replace(wires, network_latency_s=link[0], network_bytes_per_s=link[1]), known | {"network"}
        return wires, known


_KNOWN: dict[tuple[int, int], tuple[Profile, Measured]] = {}
"""By the profile's identity and the ranks on a CPU; comparing profiles would take longer."""


def measured_of(profile: Profile, ranks: int = 1) -> Measured:
    """The profile's figures, computed once; a CPU's as far as this many ranks share its cores."""
    key = id(profile), ranks if profile.on_cpu else 1
    if key not in _KNOWN:
        _KNOWN[key] = profile, Measured(profile.shared_by(ranks) if profile.on_cpu else profile)
    return _KNOWN[key][1]


def _attention_clouds(profile: Profile) -> dict[tuple[str, str, bool], tuple[Cloud, Cloud]]:
    """By format, kernel and whether heads share keys: FLOPs a second, forward and backward, of the causal half."""
    rows: dict[tuple[str, str, bool], list[tuple[tuple[float, ...], float, float]]] = {}
    for one in profile.attentions:
        flops = 2.0 * one.batch * one.heads * one.sequence**2 * one.head_dim
        sizes = (float(one.head_dim), float(one.sequence), float(one.batch * one.heads))
        key = str(one.dtype), one.kernel, one.heads != one.kv_heads
        rows.setdefault(key, []).append((sizes, flops / one.forward_s, 2.5 * flops / one.backward_s))
    clouds = {}
    for key, found in rows.items():
        forward, backward = Cloud.of((s, f) for s, f, _ in found), Cloud.of((s, b) for s, _, b in found)
        assert forward is not None and backward is not None
        clouds[key] = forward, backward
    return clouds


def _scatter(profile: Profile) -> float:
    """How many times as long as a ring of the all-reduces' rate Gloo's reduce-scatters of large messages take."""
    seconds = {(one.kind, one.ranks, one.size_bytes): one.seconds for one in profile.collectives if one.nodes == 1}
    times = [
        taken / (seconds["all-reduce", ranks, size] / 2)
        for (kind, ranks, size), taken in seconds.items()
        if kind == "reduce-scatter" and size >= _LARGE and ("all-reduce", ranks, size) in seconds
    ]
    return float(np.median(times)) if times else 1.0


def _link(rows: list[Collective]) -> tuple[float, float] | None:
    """Latency of a hop and bytes a second that fit ring all-reduces best; None where nothing was measured."""
    if len(rows) < 2:
        return None
    hops = np.array([2.0 * (one.ranks - 1) for one in rows])
    carried = np.array([2.0 * (one.ranks - 1) / one.ranks * one.size_bytes for one in rows])
    seconds = np.array([one.seconds for one in rows])
    # Relative errors are minimised, so that small messages determine the latency and large ones the rate.
    matrix = np.stack([hops, carried], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    largest = max(range(len(rows)), key=lambda place: carried[place])
    if per_byte <= 0:
        per_byte = seconds[largest] / carried[largest]
    return max(float(latency), 1e-7), 1.0 / float(per_byte)
