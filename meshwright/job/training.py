"""The sections on a training step: batch, precision, optimizer, schedule, evaluation."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.job.names import OptimizerName, ScheduleName, Settings
from meshwright.job.section import Section
from meshwright.job.tokens import SampleTokens, SequenceLength

Share = Annotated[float, Field(ge=0.0, lt=1.0)]

Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
FORMAT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "int8": 1}
"""Bytes per number in memory: tf32 and fp8 apply to matrix products only; fp8 jobs store numbers in bf16."""


class Batch(Section):
    """How much text one optimizer step processes; accumulation is derived, never set."""

    sequence_length: SequenceLength = 512
    """Tokens in one sequence."""
    global_batch: PositiveInt = Field(default=16, le=10**7)
    """Sequences in one optimizer step, over all devices."""
    micro_batch: PositiveInt = Field(default=4, le=10**7)
    """Sequences in one forward and backward on one device."""


class Precision(Section):
    """Number formats; the master parameters are always 32-bit."""

    compute: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Format of forward and backward; auto is bf16 on a GPU that has it, else fp32. Below fp32 a working copy of the
    weights is derived from the master. tf32 rounds only the inputs of products, fp16 has a dynamic loss scale, fp8 is
    bf16 with fp8 products inside the blocks."""
    fp8_scales: Literal["tensor", "row", "block"] = "tensor"
    """fp8: what shares a scale. A whole tensor; a row of either operand along the dim that is summed over; or a block,
    1 × 128 numbers of activations and gradients and 128 × 128 of weights. Rows and blocks have e4m3 gradients."""
    fp8_head: bool = False
    """fp8: the head's products too, each with one scale per tensor, and gradients in e5m2."""
    fp8_gather: bool = False
    """fp8: ranks that share the blocks' weights send each other 8 bits a number instead of 16, and get the same
    products."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated over micro-batches and reduced over ranks."""
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the optimizer's moments of matrices; int8 has a scale per 128 columns of a row, or fewer."""

    @property
    def format(self) -> Format:
        """The format of computation; that of a CPU until auto is resolved for a device."""
        return "fp32" if self.compute == "auto" else self.compute

    @property
    def number_bytes(self) -> int:
        """Bytes per number in computation."""
        return FORMAT_BYTES[self.format]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element while accumulated and reduced."""
        return FORMAT_BYTES[self.gradients]


class Optimizer(Section):
    """The update rule; weight decay applies to matrices only, not to norms, biases or vectors."""

    name: OptimizerName = "adamw"
    """adamw, sgd, adafactor, lion, muon (projections, with adamw for embedding, head and vectors), or your own."""
    lr: PositiveFloat = Field(default=3e-4, le=1e6)
    """Peak learning rate; for adafactor relative to the parameter's scale (1e-2 is usual)."""
    adamw_lr: PositiveFloat | None = Field(default=None, le=1e6)
    """muon: peak learning rate of what adamw updates, that is embedding, head and vectors; by default lr."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the first and second moments; for lion, of the momentum in the update and of the stored momentum."""
    momentum: Share = 0.95
    """sgd and muon: decay of the momentum."""
    eps: PositiveFloat = Field(default=1e-8, le=1e6)
    """Added to the square root of the second moment; for adafactor a lower bound on this root."""
    weight_decay: NonNegativeFloat = Field(default=0.1, le=1e6)
    """Decoupled weight decay of the matrices."""
    clip: NonNegativeFloat = Field(default=1.0, le=1e12)
    """Clip the global gradient norm to this; 0 disables clipping."""
    settings: Settings = Field(default_factory=dict)
    """Passed to your own optimizer besides the rate, as `{rho = 0.05}`."""


class Schedule(Section):
    """The learning rate over the run, as a factor of optimizer.lr."""

    name: ScheduleName = "cosine"
    """Warm-up, then a cosine to the floor; warm-up, stable, then linear decay (wsd); warm-up and constant; or one of
    your own."""
    warmup_steps: NonNegativeInt | None = Field(default=None, le=10**12)
    """Steps of linear warm-up from zero; by default a tenth of run.steps, at most 1000."""
    decay_steps: NonNegativeInt | None = Field(default=None, le=10**12)
    """wsd only: length of the final decay; by default a tenth of run.steps."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """The minimum rate, as a fraction of the peak rate."""
    settings: Settings = Field(default_factory=dict)
    """Read by your own schedule, as `{power = 0.5}`."""


class Evaluation(Section):
    """Held-out loss during training, and text samples from the model."""

    prose: ClassVar[frozenset[str]] = frozenset({"sample_prompt"})

    every_steps: NonNegativeInt = Field(default=100, le=10**12)
    """Steps between evaluations (plus one at the start and one at the end); 0 turns evaluation off."""
    batches: PositiveInt = Field(default=8, le=10**9)
    """Batches of batch.global_batch sequences per evaluation, of held-out text and of each set; fewer if the text is
    shorter."""
    sets: dict[str, str] = Field(default_factory=dict)
    """Other texts to evaluate on, by name: each a prepared folder or a source, as `{wiki = "prepared/wiki"}`."""
    sample_prompt: str = "def "
    """Prompt of the text samples."""
    sample_tokens: SampleTokens = 128
    """Tokens in the sample generated at each evaluation; 0 for none."""
