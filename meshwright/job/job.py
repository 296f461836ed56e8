"""The Job: every setting of a training run in one frozen object."""

from typing import Self

from pydantic import model_validator

from meshwright.job.data import Data
from meshwright.job.devices import Cluster, Layout, Memory
from meshwright.job.fields import require_read
from meshwright.job.model import Model
from meshwright.job.preference import Preference, require_preferences
from meshwright.job.running import Checkpoint, Log, Run
from meshwright.job.section import Section
from meshwright.job.training import Batch, Evaluation, Optimizer, Precision, Schedule
from meshwright.registries import SCHEDULES

_LISTED = 4096
"""The largest micro-batch that an error message suggests."""


class Job(Section):
    """One training run, from model to machine; `load_job` reads it from a file."""

    model: Model = Model()
    """The shape of the model."""
    data: Data = Data()
    """What it is trained on."""
    batch: Batch = Batch()
    """How much text one step processes."""
    layout: Layout = Layout()
    """How the work is distributed over devices."""
    memory: Memory = Memory()
    """What is recomputed or offloaded to save memory."""
    precision: Precision = Precision()
    """Number formats."""
    optimizer: Optimizer = Optimizer()
    """The update rule."""
    schedule: Schedule = Schedule()
    """The learning rate over time."""
    preference: Preference = Preference()
    """The loss over pairs of answers."""
    evaluation: Evaluation = Evaluation()
    """Held-out loss and samples."""
    checkpoint: Checkpoint = Checkpoint()
    """When state is saved."""
    run: Run = Run()
    """How long, where, with which seed."""
    log: Log = Log()
    """What is printed, and where metrics are sent."""
    cluster: Cluster = Cluster()
    """The machines."""

    @property
    def data_parallel(self) -> int:
        """Ranks that process different sequences."""
        return self.layout.dp_replicate * self.layout.dp_shard

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank runs per optimizer step."""
        return self.batch.global_batch // (self.batch.micro_batch * self.data_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.batch.global_batch * self.batch.sequence_length

    @property
    def prefers(self) -> bool:
        """Whether the loss is one over pairs of answers."""
        return self.data.format == "preferences"

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up: schedule.warmup_steps, or the default derived from run.steps."""
        given = self.schedule.warmup_steps
        return given if given is not None else min(1000, self.run.steps // 10)

    @property
    def decay_steps(self) -> int:
        """Length of the decay phase of the warm-up-stable-decay schedule; 0 for other built-in schedules."""
        given = self.schedule.decay_steps
        if self.schedule.name == "wsd":
            return given if given is not None else self.run.steps // 10
        return 0 if self.schedule.name in SCHEDULES.built_in or given is None else given

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        share = self.batch.micro_batch * self.data_parallel
        if self.batch.global_batch % share:
            rest, left = divmod(self.batch.global_batch, self.data_parallel)
            fitting = [] if left else [size for size in range(1, min(rest, _LISTED) + 1) if rest % size == 0]
            remedy = (
                f"set batch.micro_batch to one of {', '.join(map(str, fitting))}"
                if fitting
                else f"make batch.global_batch a multiple of {share}"
            )
            raise ValueError(
                f"batch.global_batch = {self.batch.global_batch} is not a multiple of batch.micro_batch × "
                f"data-parallel ranks = {self.batch.micro_batch} × {self.data_parallel}; {remedy}"
            )
        if self.model.encoder is not None:
            require_read(self.model.encoder, self.data)
        if self.batch.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"batch.sequence_length = {self.batch.sequence_length} is longer than "
                f"model.max_sequence_length = {self.model.max_sequence_length} allows; shorten the sequence or raise "
                f"the model's limit"
            )
        if self.warmup_steps + self.decay_steps > self.run.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.warmup_steps} and a decay of {self.decay_steps} steps do not fit into "
                f"run.steps = {self.run.steps}; shorten them or run longer"
            )
        if self.checkpoint.auto and self.cluster.mtbf_hours is None:
            raise ValueError(
                "checkpoint.auto = true needs cluster.mtbf_hours, the mean time between failures of the allocation; "
                "set it, or set checkpoint.every_minutes instead"
            )
        require_preferences(self)
        return self
