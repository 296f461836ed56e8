"""Turns a single-device model into the one a rank runs: the transformations in order, readable as a recipe."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.checkpoint import base_fingerprint
from meshwright.cost import Mode, needs_last
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import (
    gathers_fp8,
    gradient_format,
    is_asynchronous,
    recompute_modes,
    recomputes_encoder,
    split_layers,
    table_of,
)
from meshwright.model import CausalAttend, build_architecture
from meshwright.model.adapter import MAGNITUDE, AdaptedLinear, is_frozen
from meshwright.model.attention import Attention
from meshwright.model.encoder import encoder_blocks
from meshwright.model.feedforward import FeedForward
from meshwright.model.numbers import DTYPES
from meshwright.parallel.compression.weights import CompressedWeights
from meshwright.parallel.context.attention import make_context_attend
from meshwright.parallel.engine import Engine, OneStage
from meshwright.parallel.experts import apply_expert_parallel, reset_routers
from meshwright.parallel.fp8 import use_fp8
from meshwright.parallel.fp8_head import use_fp8_in_head
from meshwright.parallel.joined import join_working_weights
from meshwright.parallel.materialise import fill, fill_preferences
from meshwright.parallel.offload.activations import offload_activations
from meshwright.parallel.offload.sharded import count_traffic, materialise_on_host, offload_policy
from meshwright.parallel.offload.weights import OffloadedWeights, offloads, share_cores
from meshwright.parallel.pipelining.dualpipe import copies_of_chains
from meshwright.parallel.pipelining.pipedream import PipeDream, VersionedWeights
from meshwright.parallel.pipelining.pipeline import Pipeline
from meshwright.parallel.pipelining.stages import keep_stage
from meshwright.parallel.pipelining.weights import Copy, StagedWeights
from meshwright.parallel.quantised import fill_quantised, filled_apart, quantise_projections, quantised_linears
from meshwright.parallel.recompute import apply_recompute, recompute_block
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.parallel.weights import Weights, WholeWeights, one_pass_here
from meshwright.parallel.world import World
from meshwright.parallel.zero import ShardedWeights, apply_zero
from meshwright.torch_private.compiler import start_compiler

COMPILER_SAVES_MESHES = "2.12" <= torch.__version__ < "2.15"
"""Whether a compiled block that recomputes tries to save the mesh of its tensors as if it were a tensor (seen in 2.13;
in 2.11 and 2.15 it does not)."""
TORCH_SHARDS_INTEGERS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether `fully_shard` takes integers; 2.11 lets every parameter require gradients, which they cannot."""


def build(job: Job, world: World, dtype: torch.dtype | None = None) -> tuple[Engine | PipeDream, Weights]:
    """The job's model as this rank holds and runs it, with its initial weights.

    `dtype` overrides the formats of masters, gradients and computation.
    """
    master = dtype or torch.float32
    compute = dtype or DTYPES[job.precision.format]
    if offloads(job, "optimizer", "params") and world.device.type == "cuda":
        share_cores()
    engine: Engine | PipeDream
    weights: Weights
    if job.layout.pp == 1:
        model, shapes = _build_model(job, world, master, compute, range(job.model.blocks), first=True, last=True)
        if world.mesh is None:
            weights = _whole(job, world, model, master, compute)
        else:
            weights = _sharded(job, world, model, shapes, master)
        weights = _between_replicas(job, world, weights)
        engine = OneStage(job, world, model, weights)
    elif is_asynchronous(job):
        engine, weights = _build_pipedream(job, world, master, compute)
    else:
        engine, weights = _build_pipeline(job, world, master, compute)
    linears = quantised_linears(engine.modules)
    fill(weights, job.model, job.run.seed, filled_apart(linears, job.model))
    fill_quantised(weights, linears, job.model, job.run.seed)
    weights.base = base_fingerprint(job.model, job.run.seed)
    for module in engine.modules:
        reset_routers(module)
        fill_preferences(module, job.model)
    weights.refresh()
    return engine, weights


def _build_pipeline(job: Job, world: World, master: torch.dtype, compute: torch.dtype) -> tuple[Pipeline, Weights]:
    assert world.mesh is not None
    table = table_of(job)
    layers = split_layers(job, table.stages // table.parameter_copies)
    modules: dict[int, nn.Module] = {}
    parts: dict[int, ShardedWeights] = {}
    for stage in table.stages_of(world.axis_rank("pp")):
        chain = table.chain_of(stage)
        own, first, last = layers[stage - chain[0]], stage == chain[0], stage == chain[-1]
        own = range(own.start, job.model.blocks) if last else own
        model, shapes = _build_model(job, world, master, compute, own, first=first, last=last)
        modules[stage], parts[stage] = model, _sharded(job, world, model, shapes, master)
    tied = [copy for copy in _tied(job, table.chains[0][-1]) if not is_frozen(job.model, copy.owner_name)]
    copies = tied + copies_of_chains(table, {stage: list(part.masters) for stage, part in parts.items()}, tied)
    staged = StagedWeights(parts, copies, table.stage_ranks, world.mesh["pp"].get_group())
    weights = _between_replicas(job, world, staged)
    return Pipeline(job, world, modules, weights, table, compute), weights


def _build_pipedream(
    job: Job, world: World, master: torch.dtype, compute: torch.dtype
) -> tuple[PipeDream, VersionedWeights]:
    rank, last = world.axis_rank("pp"), world.axis_size("pp") - 1
    if _tied(job, last):
        raise UserError(
            f'layout.schedule = "pipedream" cannot keep the tables of the first and the last stage equal, which '
            f'model.file = {job.model.file} ties; untie them or set layout.schedule = "1f1b"'
        )
    own = split_layers(job, last + 1)[rank]
    model, _ = _build_model(job, world, master, compute, own, first=rank == 0, last=rank == last)
    weights = VersionedWeights(model, master, compute)
    return PipeDream(job, world, model, weights, compute), weights


def _tied(job: Job, last: int) -> list[Copy]:
    """The table on the last stage that equals the embedding on the first: the head's if it is tied, or the embedding's
    own if there are extra tokens; then a tied head shares it."""
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    embed, head = architecture.only("vocabulary"), architecture.only("head")
    if job.model.extra_tokens:
        return [Copy(0, f"{embed}.weight", last, f"{embed}.weight")]
    if architecture.model.get_submodule(embed).weight is not architecture.model.get_submodule(head).weight:
        return []
    return [Copy(0, f"{embed}.weight", last, f"{head}.weight")]


def _build_model(
    job: Job, world: World, master: torch.dtype, compute: torch.dtype, layers: range, *, first: bool, last: bool
) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Some layers of the model on this rank's device, without values yet, and the whole shapes of its parameters."""
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    model = architecture.model.to(master)
    for parameter in _frozen(job, model):
        parameter.data = parameter.data.to(compute)
    keep_stage(architecture, layers, first, last)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    if job.layout.tp > 1 and world.mesh is not None:
        apply_tensor_parallel(architecture, job, world.mesh["tp"])
    if job.model.experts is not None:
        apply_expert_parallel(model, job, world)
    frozen = _frozen(job, model)
    for parameter in frozen:  # tensor parallelism has made them anew
        parameter.requires_grad_(False)
    shapes |= quantise_projections(model, job.model)
    frozen = _frozen(job, model)
    if job.precision.format == "fp8" and compute == DTYPES["fp8"]:
        use_fp8(cast(nn.Module, model.layers), job.precision.fp8_scales)
        if job.precision.fp8_head and last:
            use_fp8_in_head(model)
    if job.run.compiles and job.layout.tp == 1:
        _fuse_projections(model)
    if world.context_group is not None:
        _attend_over_ranks(model, job, world.context_group)
    modes = recompute_modes(job, table_of(job) if job.layout.pp > 1 else None, world.axis_rank("pp"))
    if job.run.compiles:
        # With attention over ranks only recomputation around the block was measured on a GPU.
        around = world.context_group is not None or (job.layout.tp > 1 and COMPILER_SAVES_MESHES)
        # Before weights are drawn, which takes as long as the compiler's processes need. Of a user's own code we do not
        # know all that it imports.
        start_compiler(_what_is_traced(job, world), reuse=job.model.file is None)
        _compile(model, modes, recompute_around=around)
        _overlap(job, world)
    for block in encoder_blocks(model):
        if job.run.compiles:
            block.forward = torch.compile(block.forward)
        if recomputes_encoder(job):
            recompute_block(block)
    apply_recompute(model, modes, keep_last=needs_last(job.model), prefetch=job.layout.prefetch)
    if offloads(job, "activations"):
        offload_activations(model, world.device)
    if world.mesh is not None and not is_asynchronous(job):  # nothing is sharded where stages update independently
        offload = offload_policy(job, world.device)
        # What is not trained is shared only where parameters are: torch would keep a shard besides the whole.
        apart = job.layout.zero_stage < 3 and not offloads(job, "optimizer", "params")
        if not apart:
            _require_sharded_integers(job, frozen)
        meshes, gradients = (world.mesh, world.expert_mesh), _gradients(job, master)
        apply_zero(model, job.layout, *meshes, compute, master, gradients, offload, frozen if apart else set())
    _materialise(model, job, world)
    return model, shapes


def _require_sharded_integers(job: Job, frozen: set[nn.Parameter]) -> None:
    if TORCH_SHARDS_INTEGERS or job.model.adapter is None or all(weight.is_floating_point() for weight in frozen):
        return
    base, zero, offload = job.model.adapter.base, job.layout.zero_stage, list(job.memory.offload)
    remedy = "set layout.zero = 2" if zero == 3 else "set memory.offload = []"
    raise UserError(
        f'model.adapter.base = "{base}" with layout.zero = {zero} and memory.offload = {offload} shards integers, '
        f"which torch {torch.__version__} cannot; {remedy}, or install torch 2.13 or newer"
    )


def _frozen(job: Job, model: nn.Module) -> set[nn.Parameter]:
    """The parameters that are not trained: without masters they are in the format that is computed with."""
    return {parameter for name, parameter in model.named_parameters() if is_frozen(job.model, name)}


def _fuse_projections(model: nn.Module) -> None:
    """Fuse projections of one input into one product; eager torch would copy its parts, the compiler does not."""
    for module in model.modules():
        if isinstance(module, Attention | FeedForward | AdaptedLinear):
            module.fused = not any(name.endswith(MAGNITUDE) for name, _ in module.named_parameters())


def _compile(model: nn.Module, modes: Mapping[int, Mode], recompute_around: bool) -> None:
    """Compile every block separately: one compilation serves all of them.

    What a block recomputes is part of what is compiled, unless fully recomputed blocks recompute outside of it, as
    segments do.
    """
    # These import the compiler, which takes time.
    from meshwright.parallel.compiler_fixes import correct_attention_shapes, recompute_inside_functions

    recompute_inside_functions()
    correct_attention_shapes()
    for name, block in cast(nn.ModuleDict, model.layers).items():
        if getattr(block, "moe", None) is not None:
            _compile_around_experts(block)
        elif modes[int(name)] in ("segment", "joined") or (recompute_around and modes[int(name)] == "full"):
            block.forward = torch.compile(block.forward)
        else:
            block.compile()


def _what_is_traced(job: Job, world: World) -> str:
    """The settings that decide what a block computes, and this rank's place where ranks compute different things."""
    place = " ".join(f"{axis} {rank}" for axis, (rank, _) in world.axes.items() if not axis.startswith("dp_"))
    return f"{job.model!r} {job.layout!r} {job.memory!r} {job.precision!r} {place}"


def _overlap(job: Job, world: World) -> None:
    """Let the blocks' products hide their messages where the job asks for it."""
    from meshwright.torch_private.graph_passes import set_last_pass  # imports the compiler too

    set_last_pass(None)  # another job of this process may have asked
    if job.layout.async_tp and world.mesh is not None:
        from meshwright.parallel.async_tensor import overlap_products

        overlap_products(world.mesh["tp"])


def _compile_around_experts(block: Any) -> None:
    """Compile what precedes the experts and what follows them: in between the host waits for the number of tokens, and
    the experts gather their own weights."""
    block.attended = torch.compile(block.attended)
    block.moe.router.forward = torch.compile(block.moe.router.forward)
    if block.shared is not None:
        block.shared.compile()


def _materialise(model: nn.Module, job: Job, world: World) -> None:
    """Allocate a model's memory: on the device, or where the job keeps its weights."""
    if not offloads(job, "optimizer", "params"):
        model.to_empty(device=world.device)
    elif world.mesh is not None:  # an unsharded model gets its memory with its weights
        materialise_on_host(model, world.device)
        count_traffic(model)


def _whole(job: Job, world: World, model: nn.Module, master: torch.dtype, compute: torch.dtype) -> Weights:
    if offloads(job, "optimizer", "params"):
        gradients, stream = _gradients(job, master), offloads(job, "params")
        return OffloadedWeights(model, world.device, master, compute, gradients, stream=stream)
    narrow = one_pass_here(job, world.device) and master == torch.float32
    weights = WholeWeights(model, compute, DTYPES[gradient_format(job)] if narrow else _gradients(job, master))
    join_working_weights(model, weights.working)
    return weights


def _sharded(
    job: Job, world: World, model: nn.Module, shapes: dict[str, tuple[int, ...]], master: torch.dtype
) -> ShardedWeights:
    assert world.mesh is not None
    fp8 = gathers_fp8(job) and master == torch.float32
    ranks = world.mesh["shards"].get_group() if fp8 else None
    return ShardedWeights(model, job.layout.zero_stage, shapes, _gradients(job, master), ranks)


def _gradients(job: Job, master: torch.dtype) -> torch.dtype:
    """The format gradients are summed in; an override other than fp32 applies to everything."""
    return DTYPES[job.precision.gradients] if master == torch.float32 else master


def _between_replicas(job: Job, world: World, weights: Weights) -> Weights:
    """The weights, with gradients compressed between replicas if the job asks for it."""
    if job.layout.compress == "none" or world.mesh is None:
        return weights
    return CompressedWeights(weights, job.layout, world.mesh["replicas"].get_group())


def _attend_over_ranks(model: nn.Module, job: Job, group: ProcessGroup) -> None:
    """Let attention span the ranks that share a sequence."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "attend", None), CausalAttend)]
    if not modules:
        raise UserError(
            f"layout.cp = {job.layout.cp} needs a module with an attribute `attend` of CausalAttend to replace, and "
            f"model.file = {job.model.file} has none; add it or set layout.cp = 1"
        )
    for module in modules:
        attending = cast(Any, module)
        attending.attend = make_context_attend(job.layout.cp_method, group, attending.attend.window)
