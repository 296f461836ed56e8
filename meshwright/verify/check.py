"""One layout against one process: run both, compare, and report whether they are equal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.layout import is_asynchronous, ranks_of, require_layout
from meshwright.parallel import uses_own_table
from meshwright.registries import LOSSES, OPTIMIZERS, SCHEDULES
from meshwright.torch_private.compiler import find_cpp_compiler, preload
from meshwright.verify import formats, staged
from meshwright.verify.asynchronous import observe_stale
from meshwright.verify.collectives import Contract, prove
from meshwright.verify.compare import BOUNDS, Comparison, compare, first_wrong, zero_gradients
from meshwright.verify.compressed import is_lossy, observe_compressed
from meshwright.verify.exercised import unexercised, without_signs_of_rounding
from meshwright.verify.fused import check_fused, fused_notes
from meshwright.verify.leaks import leaks_of_own_model
from meshwright.verify.observe import Observation, observe, observe_own
from meshwright.verify.pair_sizes import PairSizes
from meshwright.verify.ranks import RankError, RankGroup, run_ranks
from meshwright.verify.recorded import CheckRecords
from meshwright.verify.replay import Choices, Replayed, routes
from meshwright.verify.sensitivity import MOST_SAMPLES, SAMPLES, exceeds, perturbation, unit_of, with_sensitivity
from meshwright.verify.vacuous import require_dropping, require_exercised, require_routing

FORMATS = (*BOUNDS, *formats.UNITS)
TIMEOUT_S = 180.0
COMPILED_TIMEOUT_S = 900.0
"""All ranks compile the same code at once, which takes minutes on few cores."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a layout with one process."""

    job: Job
    dtype: str
    rows: list[Comparison]
    seconds: float
    collectives: Contract | None = None
    """None where they were not recorded."""
    notes: list[str] = field(default_factory=list)
    """What differs from the job, one sentence each."""
    replayed: Replayed | None = None
    """Of a mixture of experts in fewer bits than float64."""

    @property
    def ok(self) -> bool:
        """Equal and without a violation of the collective contract."""
        return self.equal and (self.collectives is None or self.collectives.ok)

    @property
    def equal(self) -> bool:
        """Whether the numbers are equal."""
        return all(row.ok is not False for row in self.rows)

    @property
    def first_wrong(self) -> Comparison | None:
        """Where to start looking when they are not equal."""
        return first_wrong(self.rows)


@dataclass
class Check:
    """A layout being run; `finished` polls it, `verdict` compares it."""

    job: Job
    dtype: str
    device: str = "cpu"
    collectives: bool = False
    """Whether to record them and check the collective contract."""
    notes: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _group: RankGroup | None = None
    _records: CheckRecords | None = None

    def __post_init__(self) -> None:
        if self.dtype in formats.UNITS:
            self.job, self.notes = formats.in_format(self.job, self.dtype)
        elif self.dtype == "float32":
            self.job, self.notes = formats.without_compression(self.job, self.dtype)

    def refer(self) -> None:
        """Run the single-process references for this layout."""
        for dtype in {self.dtype, "float64"}:
            reference(self.job, dtype, self.device)

    def start(self) -> "Check":
        """Fork the ranks, after refusing what the layout cannot do."""
        require_layout(self.job, ranks_of(self.job.layout))
        prepare_compiler(self.job, self.device)
        self._started = time.monotonic()
        job, master = _in_format(self.job, self.dtype)
        ranks = ranks_of(job.layout)
        backend = _backend(self.device, ranks)
        timeout_s = COMPILED_TIMEOUT_S if job.run.compiles else TIMEOUT_S
        if self.collectives and "nccl" not in backend:  # NCCL itself checks it
            self._records = CheckRecords(ranks)
        record = None if self._records is None else self._records.folder
        run = observe_own if uses_own_table(job) else observe
        choices = replayed_choices(job, self.dtype, self.device)
        self._group = RankGroup(
            run, ranks, job, master, self.device, choices, timeout_s=timeout_s, backend=backend, record=record
        )
        return self

    def finished(self, timeout_s: float) -> bool:
        """Whether all ranks have answered, waiting at most this long; a failed rank's error is raised."""
        assert self._group is not None
        try:
            return self._group.poll(timeout_s)
        except UserError as error:
            if not uses_own_table(self.job):
                raise
            failure = error
        except RankError as error:
            raise error if self._records is None else self._records.explain(error) from None
        self.refer()  # a model that fails in one process, too, is not failed by its table
        raise failure

    def contract(self) -> Contract | None:
        """What the records of the finished ranks show; None where they were not recorded."""
        return None if self._records is None else prove(self._records.read())

    def verdict(self) -> Verdict:
        """Compare what the ranks observed with the single-process run."""
        assert self._group is not None
        ranks: Sequence[Observation] = self._group.results()
        contract = self.contract()
        self.close()
        exact, alone = reference(self.job, "float64", self.device), reference(self.job, self.dtype, self.device)
        # Only for full gradients: what compression or a stale stage leaves out of the first step may come later.
        plain = reference(self.job.model_copy(update={"layout": Layout()}), "float64", self.device)
        zeros = zero_gradients(plain)
        pairs = PairSizes.of(self.job, exact)
        if self.dtype in formats.UNITS:
            rows = formats.compare_formats(ranks, alone, exact, self.job)
        else:
            rows = compare(ranks, alone, self.dtype, zeros if self.dtype == "float32" else (), pairs)
        if self.dtype != "float64":
            margin_size = 0.0 if pairs is None else pairs.margin_size
            perturbed: list[Observation] = []
            for samples in (SAMPLES, MOST_SAMPLES):
                if exceeds(rows):
                    perturbed += self._perturbed(exact, range(len(perturbed), samples))
                    rows = with_sensitivity(rows, exact, perturbed, zero_gradients(exact), margin_size)
        replayed = Replayed.of(rank.replayed for rank in ranks)
        if replayed is not None:
            rows.append(formats.routing_row(self.job, self.dtype, replayed))
        compared = without_signs_of_rounding(rows, self.job, zeros)
        fused = [rank.fused for rank in ranks]
        compared += check_fused(self.job, self.device, fused) + leaks(self.job)
        if all(row.ok is not False for row in compared):  # a difference counts for more
            require_exercised(self.job, unexercised(self.job, zeros))
            require_dropping(self.job, plain)
            if exact.choices is not None:
                require_routing(self.job, exact.choices)
        notes = [*self.notes, *fused_notes(self.job, self.device, fused)]
        notes += [] if replayed is None else [f"{self.dtype}: {replayed}"]
        seconds = time.monotonic() - self._started
        return Verdict(self.job, self.dtype, compared, seconds, contract, notes, replayed)

    def _perturbed(self, exact: Observation, samples: range) -> list[Observation]:
        """What one process observes in float64 of numbers that rounding has changed, routed as without it."""
        job, master = _in_format(_reference_job(self.job), "float64")
        run = observe_stale if is_asynchronous(job) else observe
        unit = unit_of(self.job, self.dtype)

        def observe_all() -> list[Observation]:
            return [
                run(job, master, self.device, exact.choices, change=perturbation(unit, sample)) for sample in samples
            ]

        perturbed: list[Observation] = run_ranks(observe_all, 1, timeout_s=TIMEOUT_S * len(samples))[0]
        return perturbed

    def close(self) -> None:
        """End the ranks."""
        if self._group is not None:
            self._group.close()
        if self._records is not None:
            self._records.close()


def check(job: Job, dtype: str = "float64", device: str = "cpu", collectives: bool = False) -> Verdict:
    """Run a (small) job in its layout and in one process, and compare all that DESIGN's parity names."""
    running = Check(job, dtype, device, collectives).start()
    try:
        while not running.finished(1.0):
            pass
        return running.verdict()
    finally:
        running.close()


def check_job(job: Job, small: Job, dtype: str = "float64", device: str = "cpu", collectives: bool = False) -> Verdict:
    """The verdict on a shrunk job; besides float64, the job's own compute format is checked too."""
    if dtype in formats.UNITS:
        return check(formats.with_precision(small, job, dtype), dtype, device, collectives)
    verdict, own = check(small, dtype, device, collectives), formats.own_format(job)
    if own is None:
        return verdict
    if dtype != "float64":
        return replace(
            verdict, notes=[*verdict.notes, f'precision.compute = "{own}" is not checked with --dtype {dtype}']
        )
    second = check(formats.with_precision(small, job, own), own, device, collectives)
    contract = verdict.collectives
    if contract is not None and second.collectives is not None:
        contract = contract.also(second.collectives)
    report = f'precision.compute = "{own}": a second run in that format is compared within its own bounds'
    notes, seconds = [report, *second.notes], verdict.seconds + second.seconds
    return replace(
        verdict,
        rows=verdict.rows + [row for row in second.rows if row.kind != "leak"],
        seconds=seconds,
        collectives=contract,
        notes=notes,
        replayed=second.replayed,
    )


def reference(job: Job, dtype: str, device: str = "cpu") -> Observation:
    """The same training in one process, the whole batch at once, eager; computed once for all layouts of a job.

    An asynchronous pipeline does not train with fresh weights, and compressed gradients are not the batch's own: both
    have their own references, equally stale or lossy.
    """
    job, _ = _in_format(job, dtype)
    registered = OPTIMIZERS.changes + SCHEDULES.changes + LOSSES.changes
    return _reference(_reference_job(job).model_dump_json(), dtype, device, registered)


def leaks(job: Job) -> list[Comparison]:
    """Whether a model of the user's own lets an output depend on a later token or another document, in float64."""
    return leaks_of_own_model(in_one_process(_in_format(job, "float64")[0]))


def _reference_job(job: Job) -> Job:
    if not is_asynchronous(job) and not is_lossy(job.layout):
        return in_one_process(job)
    return job.model_copy(update={"run": job.run.model_copy(update={"compile": False})})


def in_one_process(job: Job) -> Job:
    """The job in one process, the whole batch at once, eager."""
    return job.model_copy(
        update={
            "layout": Layout(),
            "memory": type(job.memory)(),
            "batch": job.batch.model_copy(update={"micro_batch": job.batch.global_batch}),
            "data": job.data.model_copy(update={"workers": 0}),
            "run": job.run.model_copy(update={"compile": False}),
        }
    )


@lru_cache(maxsize=64)
def _reference(job_json: str, dtype: str, device: str, registered: int) -> Observation:
    # In a forked process like the ranks, so that this one has no thread pools and can safely fork again.
    job, master = _in_format(Job.model_validate_json(job_json), dtype)
    run = observe_stale if is_asynchronous(job) else observe_compressed if is_lossy(job.layout) else observe
    choices = replayed_choices(job, dtype, device)
    seen: Observation = run_ranks(run, 1, job, master, device, choices, timeout_s=TIMEOUT_S)[0]
    return seen


def replayed_choices(job: Job, dtype: str, device: str) -> Choices | None:
    """What a run in fewer bits than float64 is given: the experts that one process chose in float64."""
    if dtype == "float64" or not routes(job):
        return None
    return reference(job, "float64", device).choices


def prepare_compiler(job: Job, device: str) -> None:
    """Refuse compiled blocks if there is no compiler here, and import it, which forked ranks then need not do."""
    if not job.run.compiles or device != "cpu":
        return
    if find_cpp_compiler() is None:
        raise UserError(
            "run.compile = true: blocks are compiled for the CPU to be verified, but there is no C++ compiler here; "
            "install g++ (or name one in CXX), or verify the rest with --set run.compile=false"
        )
    preload(compiles=True)


def _backend(device: str, ranks: int) -> str:
    """NCCL where every rank has its own GPU, host memory between ranks that share one, gloo on the CPU."""
    if device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= ranks else staged.NAME


def _in_format(job: Job, dtype: str) -> tuple[Job, torch.dtype | None]:
    """The job computing in a format, and the format of masters where it is not the usual one."""
    if dtype in formats.UNITS:
        return job, None
    precision = job.precision.model_copy(update={"compute": "fp32", "gradients": "fp32"})
    return job.model_copy(update={"precision": precision}), torch.float64 if dtype == "float64" else None
