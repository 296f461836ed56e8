"""What a training program does besides the job: kernels, overlap and formats that differ from one to the next.

A job says what is computed; this says how. The first is Meshwright's own trainer. The others are well-known programs of
their years, so that published measurements can be predicted: every field is a fact of the program, none is fitted to a
source.
"""

from dataclasses import dataclass, replace
from typing import Literal

CONTEXT_BYTES = 0.6e9
"""What the driver takes for itself as soon as a process uses the device, where kernels are loaded when first used."""


@dataclass(frozen=True)
class Software:
    """How a program runs a job."""

    name: str
    own: bool = False
    """Meshwright's trainer, whose memory is known at each moment of a step."""
    attention: Literal["flash", "fused-softmax"] = "flash"
    """flash never holds the scores; fused-softmax writes them and does scale, mask and softmax in one kernel."""
    flash_generation: Literal[1, 2, 3] = 2
    """1 FlashAttention of 2022, 2 its successor (torch's own kernel), 3 what the GPU's maker wrote for it."""
    fusion: Literal["eager", "fused"] = "eager"
    """Whether neighbouring elementwise operations run as one kernel (by hand or compiled)."""
    fused_gate: bool = True
    """With fused kernels, whether SwiGLU is one of them, which computes its first half again in the backward."""
    lean_blocks: bool = False
    """Blocks compute SwiGLU's result again, keep values apart from queries and keys, and on one device have weights of
    one product side by side in memory: our compiled ones since 2026-11-18."""
    selective: Literal["cheap", "half", "attention"] = "cheap"
    """What selective recomputation recomputes: everything but projections and attention; that and every second
    projection; or the attention between its projections."""
    fp8_scales: Literal["delayed", "dynamic"] = "delayed"
    """delayed takes a tensor's scale from earlier steps, dynamic from the tensor itself."""
    gradient_overlap: bool = True
    """Gradients are reduced while the backward of other layers runs."""
    parameter_overlap: bool = True
    """Parameters are gathered while other layers run."""
    tensor_overlap: bool = False
    """Tensor-parallel transfers run in as many pieces as there are ranks, beside the products they belong to
    (Transformer Engine's userbuffers, torch's asynchronous tensor parallelism)."""
    messages: Literal["layers", "buckets", "whole", "owners"] = "layers"
    """How a step's gradients, and parameters under zero 1 and 2, are cut for their collectives: by layer as FSDP does;
    into Megatron's buckets; not at all, which is Megatron without overlap; or by tensor, each reduced to the one rank
    that owns it and broadcast by it."""
    gathers: Literal["layer", "weight"] = "layer"
    """What is gathered at once under zero 3. By weight is DeepSpeed of 2021: before its use in the forward, when the
    forward is repeated and in the backward, over a list of as many tensors as there are ranks, each copied on its
    own."""
    regather: bool = False
    """Sequence parallelism keeps its inputs sharded and gathers them again in the backward."""
    scatter_sends: bool = False
    """What goes to the next pipeline stage is sharded over the tensor-parallel ranks, and gathered there."""
    reduced_bytes: int | None = None
    """Bytes a gradient has on the wire; as precision.gradients when not given."""
    logit_bytes: float | None = None
    """What the loss holds for each logit of a micro-batch, all at once; by default it works in chunks as ours does."""
    weights_apart: bool = False
    """16-bit weights in addition to the optimizer's 32-bit masters; else the parameter is the master, sharded whole."""
    narrow_gradients: tuple[str, ...] = ()
    """With separate weights, the formats of which gradients exist in both widths: of bf16, 16-bit gradients are kept
    next to 32-bit sums; of fp16, they are widened for updates."""
    flat_gradients: bool = False
    """A rank copies its share of 16-bit gradients into one piece before it widens them."""
    pads_vocabulary: bool = False
    """The table of words is padded to whole tiles on every tensor-parallel rank, as Megatron does."""
    split_by_cost: bool = False
    """Pipeline stages are equal in what they compute, the head included, rather than in their number of layers."""
    workspace_bytes: float = 0.25e9
    """What libraries keep allocated permanently: matrix products, attention, casts."""
    bucket_elements: float = 0.0
    """Gradients that are copied into one piece on their way into a collective, where states are sharded."""
    communicators: int = 0
    """How many it makes beyond one for each axis."""
    context_bytes: float = CONTEXT_BYTES
    """What the driver takes for itself, kernels included."""
    launch_s: float = 6e-6
    """Host time to launch one kernel; a device that waits for its host takes this long per kernel. Ours is counted by
    block instead (`own_launches`)."""
    blocking: bool = False
    """The host waits for every kernel before it launches the next (CUDA_LAUNCH_BLOCKING=1): its time adds to the
    device's."""
    step_s: float = 0.0
    """Host time of a step that nothing hides: data, logging, reading the loss back."""
    grouped: float = 0.7
    """What products of many experts in one kernel reach of the rate of one product of the same size."""
    sends_once: bool = False
    """A token is sent once to each rank with experts of its own, over the network once to each node (DeepEP); else as
    often as it has experts."""
    sorts_in_transit: bool = False
    """Rows are sorted by expert by the kernels that send and receive them."""
    weighted_inside: bool = False
    """An expert's rows are weighted before its last product, whose results nothing then needs in the backward."""
    expert_calls: int = 0
    """Kernels that a product of experts launches for each of them; with none all experts' are one."""
    fused_experts: bool = False
    """The experts' products compute the gate between them, and cast their own results."""
    stashes: bool = False
    """Activations of experts that do not fit are in the host's memory, and are not recomputed."""
    waits_for_counts: bool = False
    """The host waits in every layer until it knows how many rows go where: then the device waits for the host."""
    expert_overlap: bool = False
    """Rows travel to their experts and back while another micro-batch computes."""


_OWN_WORKSPACES = 2 * 32 * 2**20
"""cuBLAS takes 32 MiB on Hopper for each thread that calls it: the program's, and autograd's in the backward."""
MESHWRIGHT = Software(
    "meshwright",
    own=True,
    flash_generation=3,
    fp8_scales="dynamic",
    workspace_bytes=_OWN_WORKSPACES,
    step_s=0.7e-3,
    grouped=0.95,
)
MESHWRIGHT_COMPILED = replace(MESHWRIGHT, name="meshwright, compiled", fusion="fused", lean_blocks=True)
_EVERY_KERNEL = 1.65e9
"""Before CUDA 11.7 a process loaded every kernel of its libraries when it started: 1573 MiB on an A100, as BLOOM's
chronicles measured."""
MEGATRON = Software(
    "Megatron-LM before fused attention",
    attention="fused-softmax",
    fusion="fused",
    selective="attention",
    pads_vocabulary=True,
    gradient_overlap=False,
    parameter_overlap=False,
    scatter_sends=True,
    messages="whole",
    regather=True,
    reduced_bytes=2,
    logit_bytes=10.0,
    weights_apart=True,
    narrow_gradients=("fp16",),
    context_bytes=_EVERY_KERNEL,
    launch_s=30e-6,
)
DEEPSPEED = replace(
    MEGATRON,
    name="Megatron-DeepSpeed before fused attention",
    narrow_gradients=("fp16", "bf16"),
    flat_gradients=True,
    bucket_elements=5e8,
    communicators=4,  # of everyone, of a replica, of the other neighbour in the pipeline, of the tied table
)
DEEPSPEED_3 = replace(DEEPSPEED, name="DeepSpeed's ZeRO-3 of 2021", gathers="weight", communicators=1)
MEGATRON_CORE = Software(
    "Megatron core with Transformer Engine",
    flash_generation=3,
    fusion="fused",
    selective="attention",
    pads_vocabulary=True,
    tensor_overlap=True,
    messages="buckets",
    regather=True,
    scatter_sends=True,
    logit_bytes=10.0,
    weights_apart=True,
    workspace_bytes=0.5e9,
    sends_once=True,
    weighted_inside=True,
    expert_calls=1,
    waits_for_counts=True,
)
# Megatron-Bridge's recipes for mixtures on Blackwell since 2026 (containers 26.06 and later): full_iteration graphs,
# moe_a2a_overlap, one fused kernel for all experts, and activations that do not fit in memory of the host.
MEGATRON_GRAPHS = replace(
    MEGATRON_CORE,
    name="Megatron core with Transformer Engine, as graphs",
    sorts_in_transit=True,
    expert_calls=0,
    fused_experts=True,
    waits_for_counts=False,
    expert_overlap=True,
    stashes=True,
)
FSDP = Software(
    "FSDP of 2023, eager, with the first fused attention", flash_generation=1, reduced_bytes=2, logit_bytes=12.0
)
# FlashAttention's package brought a loss that keeps 16-bit logits and writes their gradient in 16 bits too.
FSDP_FLASH = replace(FSDP, name="FSDP of 2023, eager, with FlashAttention and its loss", logit_bytes=4.0)
FSDP_EAGER = Software(
    "FSDP, eager, with torch's fused attention", selective="half", fp8_scales="dynamic", logit_bytes=12.0
)
FSDP_COMPILED = Software(
    "FSDP, compiled", fusion="fused", selective="half", fp8_scales="dynamic", logit_bytes=12.0, launch_s=4e-6
)
ZERO = Software(
    "ZeRO of 2023, eager, with the first fused attention",
    flash_generation=1,
    messages="owners",
    reduced_bytes=2,
    logit_bytes=12.0,
    weights_apart=True,
)
PLAIN = Software(
    "fused attention, nothing hidden behind compute",
    fusion="fused",
    messages="whole",
    regather=True,
    gradient_overlap=False,
    parameter_overlap=False,
    logit_bytes=10.0,
    weights_apart=True,
    narrow_gradients=("fp16", "bf16"),
)
NANOTRON = replace(PLAIN, name="nanotron", fused_gate=False, split_by_cost=True)
