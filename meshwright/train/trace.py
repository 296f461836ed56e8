"""A trace of some steps per rank: every operation, inside ranges that are named after what the step is doing.

step N
  data · forward and backward · reduce · update · record      one after the other, as the loop reports them
    forward, backward      inside; with a pipeline of each micro-batch and stage
      block N              inside a forward, if blocks are not compiled
    clip, optimizer        inside the update
  evaluation · checkpoint  after the step, if due

Torch's profiler records them, and its file opens in Perfetto. With NVTX the same ranges are marked for nsys instead: a
GPU's events have one reader at a time. Nothing of this is in place before the first traced step or after the last. An
error in tracing is reported and ends the trace, never the run.
"""

import errno
import gzip
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.atomic import atomic_file
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import is_asynchronous
from meshwright.parallel import Range
from meshwright.train.around import Around, Call
from meshwright.train.optimizer import OnePassAdamW

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer

MOST_STEPS = 100
"""A trace is held in memory until it is written, megabytes per step."""
_STEPS = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")
_NO_LOG = "6"
"""Above every level of the profiler's own log."""
_NAMES = {
    "reading data": "data",
    "sum of loss and gradient norm over all ranks": "reduce",
}
"""What the loop calls its activities, where a phase has a shorter name."""


@dataclass(frozen=True)
class TraceSteps:
    """Which steps are traced, and how."""

    first: int
    last: int
    nvtx: bool = False
    """Mark the steps for nsys instead of writing a file."""

    @classmethod
    def parse(cls, text: str, job: Job, *, nvtx: bool = False) -> Self:
        """`10-12` or `10`; steps that the job does not have are refused."""
        found = _STEPS.fullmatch(text.strip())
        if found is None:
            raise UserError(f"--trace {text} is no range of steps; write it like 10-12, or 10 for one step")
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise UserError(f"--trace {text} ends before it begins; write it as {last}-{first}")
        if not 1 <= first <= last <= job.run.steps:
            raise UserError(f"--trace {text} is not within the steps of the job; give some from 1 to {job.run.steps}")
        if last - first >= MOST_STEPS:
            raise UserError(f"--trace {text} is {last - first + 1} steps; trace at most {MOST_STEPS}, a few are enough")
        require_traceable(job)
        return cls(first, last, nvtx)

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"


def require_traceable(job: Job) -> None:
    """Reject a job whose steps cannot be told apart."""
    if is_asynchronous(job):
        raise UserError(
            f'--trace needs steps that end before the next begins; layout.schedule = "{job.layout.schedule}" overlaps '
            "them, so choose another schedule to trace"
        )


def require_nvtx(device: torch.device) -> None:
    """Reject marks for nsys where there is nothing to mark."""
    if device.type != "cuda" or torch.version.hip:
        raise UserError(
            f"--nvtx marks steps for nsys, which needs an NVIDIA GPU; the job runs on {device.type}, so leave it out"
        )


class Trace:
    """One rank's trace of some steps; `step` wraps each of them."""

    def __init__(self, steps: TraceSteps, folder: Path, training: "Trainer", report: Callable[[str], None]) -> None:
        self._steps, self._folder, self._training, self._report = steps, folder, training, report
        self._range: Range = torch.cuda.nvtx.range if steps.nvtx else record_function
        self._recording = ExitStack()
        self._profile: Any = None
        self._names: _Names | None = None
        self._done: list[int] = []
        self._over = False

    def covers(self, step: int) -> bool:
        """Whether a step is traced."""
        return not self._over and self._steps.first <= step <= self._steps.last

    @contextmanager
    def step(self, step: int, between: Callable[[bool], AbstractContextManager[None]]) -> Iterator[None]:
        """Trace what runs inside; starting and writing count for no step, which `between` sees to."""
        if self._names is None:
            with between(True):
                self._safely(self._begin)
        if self._names is None:
            yield
            return
        try:
            with self._range(f"step {step}"), self._names.step():
                yield
        except BaseException:
            self._recording.close()
            self._over = True
            raise
        self._done.append(step)
        if step == self._steps.last:
            with between(True):
                self.end()

    def end(self) -> None:
        """Write what was traced; before the last step only if the run ends early."""
        if not self._over and self._done:
            self._safely(self._finish)
        self._over = True

    def _begin(self) -> None:
        cuda = self._training.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._training.device)
        if self._steps.nvtx:
            self._profile = torch.cuda.profiler.profile()  # nsys can be told to record only between its start and stop
        else:
            if not cuda:  # where it has only its beginning and end to log
                os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11, also of a single cycle
            self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda])
        self._recording.enter_context(self._profile)
        names = _Names(self._training, self._range)
        self._recording.callback(names.undo)
        names.begin()
        self._names = names

    def _finish(self) -> None:
        training, first, last = self._training, self._done[0], self._done[-1]
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)
        if not self._steps.nvtx:
            facts = {"rank": training.world.rank, "ranks": training.world.size, "attempt": training.attempt}
            self._profile.add_metadata_json("meshwright", json.dumps({**facts, "steps": self._done}))
        self._recording.close()
        if self._steps.nvtx:
            return
        training.activity.at("writing the trace")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"attempt-{training.attempt}-steps-{first}-{last}-rank-{training.world.rank}.json.gz"
        _write(self._profile, path)
        training.recorder.event("trace", step=last, first_step=first, file=path.name)

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            with suppress(Exception):
                self._recording.close()
            self._over = True
            self._report(f"no trace of {self._steps} ({type(error).__name__}: {error}); training continues")


class _Names:
    """The ranges of the steps, until `undo`."""

    def __init__(self, training: "Trainer", name: Range) -> None:
        self._training, self._range = training, name
        self._around = Around()
        self._hooks: list[Any] = []
        self._phase: AbstractContextManager[Any] | None = None
        self._blocks: list[AbstractContextManager[Any]] = []

    def begin(self) -> None:
        """Name what the steps do from now on."""
        training = self._training
        self._around.replace(training.activity, "at", self._marking)
        self._around.replace(training, "_record", self._recording_phase)
        self._around.replace(training, "_clip", self._inside("clip"))
        if isinstance(training.optimizer, OnePassAdamW):
            self._around.replace(training, "_launch_update", self._inside("optimizer"))
        self._around.replace(training.weights, "update", self._inside("optimizer"))
        training.engine.named(self._range)
        for module in () if training.job.run.compiles else training.engine.modules:
            for layer, block in getattr(module, "layers", {}).items():
                self._hook(block, f"block {layer}")

    def undo(self) -> None:
        """Name nothing any more."""
        self._around.undo()
        self._training.engine.named(None)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """On exit every range of the step has ended."""
        try:
            yield
        finally:
            while self._blocks:  # that an error left
                self._blocks.pop().__exit__(None, None, None)
            self._end_phase()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _enter_phase(self, name: str) -> None:
        self._end_phase()
        self._phase = self._range(name)
        self._phase.__enter__()

    def _marking(self, at: Call) -> Call:
        def marked(phase: str, step: int | None = None) -> None:
            at(phase, step)
            self._enter_phase(_NAMES.get(phase, phase))

        return marked

    def _recording_phase(self, record: Call) -> Call:
        def marked(*args: Any) -> None:
            self._enter_phase("record")
            record(*args)

        return marked

    def _inside(self, name: str) -> Callable[[Call], Call]:
        def replaced(call: Call) -> Call:
            def named(*args: Any) -> Any:
                with self._range(name):
                    return call(*args)

            return named

        return replaced

    def _hook(self, block: nn.Module, name: str) -> None:
        """A range around a block's forward, with the hooks of sharding inside."""

        def enter(*_: Any) -> None:
            self._blocks.append(self._range(name))
            self._blocks[-1].__enter__()

        def leave(*_: Any) -> None:
            if self._blocks:
                self._blocks.pop().__exit__(None, None, None)

        self._hooks.append(block.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(block.register_forward_hook(leave, always_call=True))


def _write(recorded: Any, path: Path) -> None:
    """The trace as a compressed file, complete or not at all."""
    # The profiler leaves its own drafts where the disk is full.
    with atomic_file(path) as draft, TemporaryDirectory(prefix=".trace-", dir=path.parent) as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        _require_complete(plain)
        with plain.open("rb") as source, gzip.open(draft, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)


def _require_complete(plain: Path) -> None:
    """The profiler does not say that the disk was full: it leaves no file, or a part of one."""
    end = b""
    if plain.is_file():
        with plain.open("rb") as file:
            file.seek(-min(64, plain.stat().st_size), os.SEEK_END)
            end = file.read().rstrip()
    if not end.endswith(b"}"):
        raise OSError(errno.ENOSPC, "the profiler could not write all of it; is the disk full?")
