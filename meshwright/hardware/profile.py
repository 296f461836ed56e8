"""Measurements of a device: what a calibration profile holds."""

from datetime import date
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.hardware.gpus import Dtype, Fact, Gpu, known_gpus

FORMAT = 2
"""The version of a profile's fields that is written. Files without a version are of the first, which does not say with
which driver, beside which CPU and how it was measured."""
ProductKind = Literal["forward", "input", "weight", "weight sum"]
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
OperationName = Literal[
    "rmsnorm", "layernorm", "rotary", "swiglu", "gelu", "bias", "dropout", "sum", "scale", "fill", "embedding"
]
CPU = "cpu"
"""The key of a profile of a CPU."""


class Product(Fact):
    """One matrix product, (rows × inner) @ (inner × columns)."""

    dtype: Dtype
    """Format of its operands."""
    kind: ProductKind
    """Which of a projection's it is: its operands have different memory layouts; "weight sum" adds to a wider
    matrix."""
    rows: PositiveInt
    """Of the result."""
    columns: PositiveInt
    """Of the result."""
    inner: PositiveInt
    """What is summed over."""
    seconds: PositiveFloat
    """Median."""


class Attention(Fact):
    """One causal attention."""

    kernel: str
    """Which of torch's kernels, and how grouped heads reach it."""
    dtype: Dtype
    """Format."""
    batch: PositiveInt
    """Sequences."""
    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Size of a head."""
    sequence: PositiveInt
    """Tokens of a sequence."""
    forward_s: PositiveFloat
    """Median of the forward."""
    backward_s: PositiveFloat
    """Median of the backward."""


class Copy(Fact):
    """Memory copied on the device."""

    moved_bytes: PositiveFloat
    """Read and written together."""
    seconds: PositiveFloat
    """Median."""


class Loss(Fact):
    """The loss and its gradient, from existing logits."""

    rows: PositiveInt
    """Tokens."""
    vocabulary: PositiveInt
    """Logits of each."""
    dtype: Dtype | None = None
    """Format of the logits; None for the device's main one, bf16 of a GPU and fp32 of a CPU."""
    compiled: bool
    """Whether torch's compiler generated its kernels."""
    seconds: PositiveFloat
    """Median."""


class Update(Fact):
    """An AdamW step over fp32 masters, gradients and moments."""

    parameters: PositiveInt
    """Updated at once."""
    tensors: PositiveInt = 4
    """They are in so many, equally large."""
    clipped: bool = False
    """Whether the gradients' norm and their scaling are included."""
    seconds: PositiveFloat
    """Median."""


class Operation(Fact):
    """One operation that is neither a product nor attention, as the trainer runs it on a CPU: in a chain, so that
    results are in new memory and stay until the backward."""

    name: OperationName
    """Which."""
    dtype: Dtype
    """Format."""
    rows: PositiveInt
    """Of its result."""
    width: PositiveInt
    """Entries of a row."""
    forward_s: PositiveFloat
    """Median of the forward."""
    backward_s: NonNegativeFloat
    """Median of the backward."""


class Decoder(Fact):
    """One micro-batch of a small decoder as the trainer runs it: what calls take beyond the operations they make."""

    model: dict[str, int | str | bool]
    """Its shape, as in a job."""
    sequence_length: PositiveInt
    """Tokens of its one sequence."""
    recompute: str
    """memory.recompute."""
    zero: int | None = None
    """layout.zero, where all measured ranks share it; None without data parallelism."""
    forward_s: PositiveFloat
    """Median of the forward, the loss included."""
    backward_s: PositiveFloat
    """Median of the backward, up to the gradients in the masters."""


class Collective(Fact):
    """One collective over some ranks."""

    kind: CollectiveKind
    """Which."""
    ranks: PositiveInt
    """Members of the group."""
    nodes: PositiveInt
    """Machines they are on."""
    size_bytes: PositiveInt
    """The whole buffer: what an all-reduce sums, what an all-gather ends with, what a send carries."""
    seconds: PositiveFloat
    """Median."""


class Profile(Fact):
    """A device as it was measured."""

    format: PositiveInt = 1
    """The version of these fields."""
    gpu: str
    """Its key in the hardware table, or one made of its name."""
    device: str
    """Its name as torch or the machine prints it."""
    date: str
    """The day."""
    torch: str
    """The version measured with."""
    cuda: str | None = None
    """The version of CUDA torch was built for."""
    driver: str | None = None
    """The version of the GPU's driver."""
    host_cpu: str | None = None
    """The CPU that launches kernels and updates what is offloaded."""
    host_cores: PositiveInt | None = None
    """Cores that the measuring process could use."""
    machine: str | None = None
    """The name of the machine that was measured."""
    meshwright: str | None = None
    """The version of Meshwright that measured."""
    how: str | None = None
    """How it was measured, in a sentence."""
    memory_gib: PositiveFloat
    """Memory of the device."""
    units: PositiveInt
    """Multiprocessors, or the threads of one rank on a CPU."""
    ranks: PositiveInt = 1
    """Ranks that measured at the same time: those on a CPU share its cores."""
    process_bytes: PositiveFloat | None = None
    """Memory of a rank's program before it has tensors, on a CPU."""
    took_s: PositiveFloat
    """Seconds the measuring took."""
    products: tuple[Product, ...] = ()
    """Matrix products."""
    attentions: tuple[Attention, ...] = ()
    """Attention."""
    copies: tuple[Copy, ...] = ()
    """Copies on the device."""
    losses: tuple[Loss, ...] = ()
    """Losses."""
    updates: tuple[Update, ...] = ()
    """Optimizer steps on the device."""
    operations: tuple[Operation, ...] = ()
    """Operations between products and attention, on a CPU."""
    decoders: tuple[Decoder, ...] = ()
    """Small decoders, on a CPU."""
    to_device_bytes_per_s: PositiveFloat | None = None
    """Page-locked host memory to the device."""
    to_host_bytes_per_s: PositiveFloat | None = None
    """The device to page-locked host memory."""
    host_update_bytes_per_s: PositiveFloat | None = None
    """Memory traffic the host's cores reach in an AdamW step."""
    launch_s: PositiveFloat | None = None
    """Host time to start a kernel."""
    kernel_s: PositiveFloat | None = None
    """Least time between kernels that nothing but the device bounds."""
    collectives: tuple[Collective, ...] = ()
    """Collectives."""
    skipped: tuple[str, ...] = Field(default=())
    """What could not be measured, and why."""

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.gpu == CPU

    @property
    def kind(self) -> Literal["CPU", "GPU"]:
        """What the device is."""
        return "CPU" if self.on_cpu else "GPU"

    @property
    def file_name(self) -> str:
        """Where plans look for it: a CPU has a profile for each number of ranks that share it."""
        return file_name_of(self.gpu, self.ranks)

    def shared_by(self, ranks: int) -> "Profile":
        """A CPU's profile for another number of ranks than measured it, if each gets its part of the cores."""
        slower = ranks / self.ranks
        if slower == 1.0:
            return self
        timed = ("products", "attentions", "copies", "losses", "updates", "operations")
        rows = {name: tuple(_slowed(one, slower) for one in getattr(self, name)) for name in timed}
        return self.model_copy(update={"ranks": ranks, **rows})

    def as_gpu(self) -> Gpu:
        """What is known of a device missing from the hardware table: its memory, but no peak."""
        peak: dict[Dtype, float] = {}
        for product in self.products:
            rate = 2.0 * product.rows * product.columns * product.inner / product.seconds
            peak[product.dtype] = max(rate, peak.get(product.dtype, 0.0))
        fastest = max(self.copies, key=lambda one: one.moved_bytes, default=None)
        return Gpu(
            key=self.gpu,
            names=(self.device,),
            memory_gib=self.memory_gib,
            memory_bandwidth_bytes_per_s=None if fastest is None else fastest.moved_bytes / fastest.seconds,
            peak=peak,
            source=f"measured on {self.date}: the fastest matrix product in each format is taken as its peak",
        )


def _slowed(row: Fact, times: float) -> Fact:
    """A row whose seconds are multiplied."""
    seconds = {name: times * value for name, value in row if name in ("seconds", "forward_s", "backward_s")}
    return row.model_copy(update=seconds)


def today() -> str:
    """The day as profiles write it."""
    return date.today().isoformat()


def is_known(gpu: Gpu) -> bool:
    """Whether a GPU is in the hardware table."""
    return any(known.key == gpu.key for known in known_gpus())


def file_name_of(key: str, ranks: int) -> str:
    """The file of a device's profile in a folder of profiles."""
    return f"{key}.json" if key != CPU or ranks == 1 else f"{key}-{ranks}-ranks.json"
