"""What predictions of two runs have in common, and so how much the error of one says about the other."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.plan.machine import Machine
from meshwright.plan.software import Software

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

AXES = ("tp", "cp", "pp", "zero", "ep", "experts")
Program = Literal["fused", "eager", "scores written out"]
Precision = Literal["fp32", "16-bit", "fp8"]
Counted = Literal["allocated", "reserved", "device"]

_FAMILIES = (
    (("v100",), "Volta", "NVIDIA"),
    (("a100",), "Ampere", "NVIDIA"),
    (("h100", "h200", "gh200"), "Hopper", "NVIDIA"),
    (("b200", "b300", "gb200", "gb300"), "Blackwell", "NVIDIA"),
    (("a40", "l40s", "rtx"), "GDDR cards", "NVIDIA"),
    (("mi250x",), "CDNA 2", "AMD"),
    (("mi3",), "CDNA 3", "AMD"),
    ((CPU,), "CPU", "CPU"),
)
"""GPUs of one family share their rates (`meshwright.plan.rates`), and so their errors."""

# How far apart two runs are if they differ in this. A run at distance d counts exp(-d) of one that is the same in all.
# The order is judgement: another maker's kernels say least, a neighbouring size of the machine says most. Nothing here
# is fitted to a source: with all of them halved or doubled, 80 to 86% of the published times are still covered.
_OTHER_GPU, _OTHER_FAMILY, _OTHER_MAKER = 0.75, 1.5, 3.0
_OTHER_FOOTING = 3.0
"""Time: predicted from a profile or from a datasheet. Memory: our trainer's, known at each moment, or another's."""
_OTHER_TRAINER = 0.5
"""Time of our trainer or of another program, over whose habits the software's facts do not say all."""
_DOUBLING = 0.22
"""Twice as many GPUs."""
_OTHER_AXIS = 0.75
"""An axis that only one of them uses."""
_OTHER_MODEL = 2.5
"""A mixture of experts or none: other kernels do most of its work."""
_OTHER_PROGRAM = 0.75
_OTHER_PRECISION = 0.45
_OTHER_COUNT = 0.75
"""Memory that was counted in another way: what an allocator keeps and a driver takes is not in every count."""


_AXIS_DISTANCES = np.array([_OTHER_MODEL if axis == "experts" else _OTHER_AXIS for axis in AXES])


@dataclass(frozen=True)
class Traits:
    """What a run's error depends on, as far as is known."""

    gpu: str
    gpus: int
    calibrated: bool
    """Predicted from a profile of the GPU."""
    own: bool
    """Our trainer, not another program."""
    axes: frozenset[str]
    """Of tp, cp, pp, zero and ep those that are used, and whether the model has experts."""
    program: Program
    precision: Precision
    counted: Counted = "device"
    """How memory was counted, where it was: a plan is about all that is used on the device."""

    @property
    def family(self) -> str:
        """GPUs that share their rates with this one; itself if it is known only from a profile."""
        return _family(self.gpu)[0]

    @property
    def maker(self) -> str:
        """Who makes the GPU, as far as it is known."""
        return _family(self.gpu)[1]

    @property
    def axes_words(self) -> str:
        """`tp + pp`, or what there is without any axis."""
        used = " + ".join(axis for axis in AXES if axis in self.axes)
        one = "rank" if self.gpu == CPU else "GPU"
        return used or (f"one {one}" if self.gpus == 1 else "replicas")


@cache
def _family(gpu: str) -> tuple[str, str]:
    """Family and maker."""
    return next(((family, maker) for starts, family, maker in _FAMILIES if gpu.startswith(starts)), (gpu, ""))


def is_calibrated(machine: Machine) -> bool:
    """Whether predictions for a machine use measurements of its own GPU."""
    return machine.measured is not None


def traits_of(
    job: Job, gpu: str, gpus: int, software: Software, *, calibrated: bool, counted: Counted = "device"
) -> Traits:
    """A job's traits on so many GPUs."""
    layout = job.layout
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    axes = {axis for axis, size in sizes.items() if size > 1}
    if layout.zero_stage and job.data_parallel * layout.cp > 1:
        axes.add("zero")
    if job.model.experts is not None:
        axes.add("experts")
    program: Program = "fused" if software.fusion == "fused" else "eager"
    if software.attention != "flash":
        program = "scores written out"
    wide: Precision = "fp32" if job.precision.number_bytes == 4 else "16-bit"
    precision: Precision = "fp8" if job.precision.format == "fp8" else wide
    return Traits(gpu, gpus, calibrated, software.own, frozenset(axes), program, precision, counted)


class Distances:
    """Distances from some runs to any other, by arrays: a plan asks for many of them."""

    def __init__(self, runs: "Sequence[Traits]", footing: Literal["calibrated", "own"]) -> None:
        self._footing = footing
        self._trainer = _OTHER_TRAINER if footing == "calibrated" else 0.0
        self._count = _OTHER_COUNT if footing == "own" else 0.0
        self._gpu = np.array([one.gpu for one in runs])
        self._family = np.array([one.family for one in runs])
        self._maker = np.array([one.maker for one in runs])
        self._based = np.array([getattr(one, footing) for one in runs], dtype=bool)
        self._own = np.array([one.own for one in runs], dtype=bool)
        self._doublings = np.log2(np.array([one.gpus for one in runs], dtype=float))
        self._axes = np.array([[axis in one.axes for axis in AXES] for one in runs], dtype=bool)
        self._program = np.array([one.program for one in runs])
        self._precision = np.array([one.precision for one in runs])
        self._counted = np.array([one.counted for one in runs])

    def to(self, run: Traits) -> "NDArray[np.float64]":
        """How far each of the runs is from this one."""
        family = np.where(self._family == run.family, _OTHER_GPU, _OTHER_FAMILY)
        gpu = np.where(self._maker == run.maker, family, _OTHER_MAKER)
        used = np.array([axis in run.axes for axis in AXES], dtype=bool)
        return np.asarray(
            np.where(self._gpu == run.gpu, 0.0, gpu)
            + _OTHER_FOOTING * (self._based != getattr(run, self._footing))
            + self._trainer * (self._own != run.own)
            + _DOUBLING * np.abs(self._doublings - np.log2(run.gpus))
            + (self._axes != used) @ _AXIS_DISTANCES
            + _OTHER_PROGRAM * (self._program != run.program)
            + _OTHER_PRECISION * (self._precision != run.precision)
            + self._count * (self._counted != run.counted),
            dtype=np.float64,
        )
