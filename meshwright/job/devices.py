"""The sections on where the work runs: layout, memory, cluster."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from meshwright.job.section import Section


class Layout(Section):
    """How the model and the batch are distributed over devices; all ones is a single device."""

    dp_replicate: PositiveInt = Field(default=1, le=10**6)
    """Copies of the whole sharded group (hybrid sharding's outer axis)."""
    dp_shard: PositiveInt = Field(default=1, le=10**6)
    """Ranks over which one copy of the states is sharded according to zero."""
    zero: Literal[0, 1, 2, 3] | None = None
    """0 replicates, 1 shards optimizer states, 2 gradients too, 3 parameters too; default 2 over dp_shard ranks."""
    tp: PositiveInt = Field(default=1, le=10**4)
    """Tensor parallelism: ranks over which every matrix is split."""
    sp: bool = True
    """Sequence parallelism in the norm regions when tp > 1."""
    async_tp: bool = False
    """Run the products of compiled blocks in pieces beside the messages of tensor parallelism; GPUs of one node."""
    kv_replicate: bool = False
    """Let tp ranks hold copies of key and value heads when tp does not divide them."""
    cp: PositiveInt = Field(default=1, le=10**4)
    """Context parallelism: ranks over which every sequence is split."""
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """How keys and values are exchanged across cp ranks."""
    ep: PositiveInt = Field(default=1, le=10**4)
    """Expert parallelism: ranks over which a layer's experts are distributed, out of the dp_shard, cp and tp ranks;
    tokens are sent to the ranks of their experts and back."""
    pp: PositiveInt = Field(default=1, le=10**4)
    """Pipeline parallelism: ranks over which the layers are split."""
    schedule: Literal[
        "naive",
        "gpipe",
        "1f1b",
        "interleaved",
        "zb-h1",
        "zb-interleaved",
        "zb-v",
        "dualpipe",
        "dualpipe-v",
        "pipedream",
    ] = "1f1b"
    """Order of forwards and backwards in the pipeline."""
    virtual_stages: PositiveInt | None = Field(default=None, le=10**4)
    """Stages per pipeline rank; by default the schedule's own number."""
    split: tuple[Annotated[int, Field(le=10**4)], ...] | None = None
    """Layers per stage; by default balanced by cost."""
    order: Literal["pp-outside", "dp-outside"] = "pp-outside"
    """Which of pipeline and data parallelism spans the slower links."""
    compress: Literal["none", "topk", "fp16", "bf16", "int8", "powersgd"] = "none"
    """Gradient compression between replicas, with error feedback."""
    compress_ratio: float = Field(default=0.01, gt=0.0, le=1.0)
    """topk: fraction of the entries that is sent."""
    compress_after: NonNegativeInt = Field(default=0, le=10**12)
    """Steps at the start of training with uncompressed gradients: compressing their large gradients hurts most."""
    compress_rank: PositiveInt = Field(default=4, le=10**5)
    """powersgd: rank of the approximation."""
    bucket_mb: PositiveFloat = Field(default=25.0, le=1e6)
    """Gradients are reduced in buckets of about this size."""
    prefetch: NonNegativeInt = Field(default=1, le=10**4)
    """Layers whose parameters are gathered ahead of use; 0 gathers each when it is needed, without overlap."""

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage: as given, or else 2 if there are ranks to shard over and 0 if not."""
        if self.zero is not None:
            return self.zero
        return 2 if self.dp_shard * self.cp > 1 else 0

    @property
    def shares_states(self) -> bool:
        """Whether several ranks share the states of their parameters."""
        return self.zero_stage > 0 and self.dp_shard * self.cp > 1


class Segments(Section):
    """Checkpointing every k layers: only the input of every k consecutive blocks is kept."""

    segments: PositiveInt = Field(le=10**4)
    """Blocks of a segment, which is recomputed as a whole; a pipeline stage begins a new one."""

    def __str__(self) -> str:
        return f"{{segments = {self.segments}}}"


class Every(Section):
    """Full recomputation of one block in every k, so that a larger k recomputes less; not what is usually called
    checkpointing every k layers, which is `Segments`."""

    every: PositiveInt = Field(le=10**4)
    """Blocks 0, k, 2k, … are recomputed."""

    def __str__(self) -> str:
        return f"{{every = {self.every}}}"


class Budget(Section):
    """As little recomputation as fits."""

    budget_gib: PositiveFloat = Field(le=1e6)
    """GiB of activations a rank may keep for its backward passes."""

    def __str__(self) -> str:
        return f"{{budget_gib = {self.budget_gib:g}}}"


class Memory(Section):
    """What is recomputed or offloaded to save device memory."""

    recompute: Literal["none", "selective", "full"] | Segments | Every | Budget = "none"
    """Activations to drop and recompute: none, selective, full, {segments = k} (only every k-th block's input is kept),
    {every = k} (one block in k is recomputed, the others keep all) or {budget_gib = x}."""
    offload: tuple[Literal["optimizer", "params", "activations"], ...] = ()
    """Kept in host memory: optimizer (masters, gradients, states), params (the working copy too), activations."""

    @field_validator("recompute", mode="wrap")
    @classmethod
    def _one_of_these(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            shown = "{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}" if isinstance(value, dict) else value
            raise ValueError(
                f'memory.recompute = {shown} is not allowed; it should be "none", "selective", "full", '
                "{segments = k} or {every = k} with a whole number of blocks, or {budget_gib = x} with x greater than 0"
            ) from None


class Cluster(Section):
    """The machines a job is meant for, used by the planner and by the launcher on a site; `train` runs it on any."""

    name: str | None = None
    """A known site such as `leonardo`, or a profile file; it provides gpu, gpus_per_node, links, host_memory_gib
    and power where the job does not."""
    nodes: PositiveInt = Field(default=1, le=10**6)
    """Machines; by default as many as the layout needs of those that name or gpus_per_node describes."""
    gpus_per_node: PositiveInt = Field(default=1, le=10**4)
    """Devices per machine; by default the site's."""
    gpu: str | None = None
    """Device type, e.g. `h200` or `a100-80gb`; a run itself uses what it finds."""
    links: dict[str, Annotated[PositiveFloat, Field(le=1e9)]] | None = None
    """Measured bandwidths in GB/s, one direction: node (a GPU to the others of its node), network (a whole node)."""
    host_memory_gib: PositiveFloat | None = Field(default=None, le=1e9)
    """Memory of one machine; what is offloaded has to fit into it."""
    storage_gb_s: PositiveFloat | None = Field(default=None, le=1e9)
    """GB/s that the storage of checkpoints takes from all machines together."""
    mtbf_hours: PositiveFloat | None = Field(default=None, le=1e9)
    """Mean time between failures of the whole allocation."""
    price: NonNegativeFloat | None = Field(default=None, le=1e9)
    """Cost of one device-hour."""
    gpu_watts: PositiveFloat | None = Field(default=None, le=1e5)
    """Power of one device under load, if measured; by default the limit of its board."""
    pue: float | None = Field(default=None, ge=1.0, le=100.0)
    """Energy of the whole site over that of its computers; without it a plan counts the devices alone."""
    co2_g_per_kwh: NonNegativeFloat | None = Field(default=None, le=1e5)
    """Grams of CO₂ per kWh of the site's electricity."""
