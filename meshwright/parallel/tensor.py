"""Tensor and sequence parallelism: every module's role in the sharding table becomes a DTensor style.

Matrices are sharded by columns, then by rows, so that one collective on either side serves the pair. Between blocks the
residual stream is whole on every rank, or with sequence parallelism sharded along the sequence (dim 1).
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import padded_vocabulary
from meshwright.model import Architecture, Draws
from meshwright.model.adapter import A, AdaptedLinear
from meshwright.model.dropout import keep_mask
from meshwright.model.sharding import LOOKED_UP, PROJECTIONS
from meshwright.model.sinks import Sinks
from meshwright.parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

_KINDS = {**dict.fromkeys(LOOKED_UP, nn.Embedding), **dict.fromkeys(PROJECTIONS, nn.Linear)}
"""The modules that can have a role; others can be on any."""


def apply_tensor_parallel(architecture: Architecture, job: Job, mesh: DeviceMesh) -> None:
    """Shard a model (on the meta device) over the ranks of a mesh axis, in place; parameter names stay."""
    between: Placement = Shard(1) if job.layout.sp else Replicate()
    model = architecture.model
    modules = list(_with_roles(architecture))
    named = [architecture.only(role, required=job.layout.pp == 1) for role in ("vocabulary", "head")]
    embed, head = (cast(Any, model.get_submodule(name) if name else None) for name in named)
    tied = embed is not None and head is not None and embed.weight is head.weight
    _pad_vocabulary(embed, head, padded_vocabulary(job), tied)
    for name, role in modules:
        if role not in ("vocabulary", "head", "experts"):
            # Pictures and sound are encoded whole on every rank: sequence parallelism is the decoder's.
            inside = job.model.encoder is not None and name.startswith(f"{job.model.encoder.section}.")
            placed = Replicate() if inside else between
            parallelize_module(model.get_submodule(name), mesh, _style(role, job, mesh, placed))
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            module.keep = _kept
    if embed is not None:
        embed.weight = nn.Parameter(distribute_tensor(embed.weight, mesh, [Shard(0)]))
        _replace(model, named[0], VocabularyParallelEmbedding(embed, mesh, between))
    if head is not None:
        head.weight = embed.weight if tied else nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))
        _replace(model, named[1], VocabularyParallelHead(head, mesh, job.model.vocab_size, between))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _with_roles(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Every module's dotted name with its role; one of the wrong kind, or with its own parameters and no role, is an
    error."""
    for name, module in architecture.model.named_modules():
        if (role := architecture.role(name)) is not None:
            if not isinstance(module, _KINDS.get(role, nn.Module)):
                raise UserError(
                    f'model.file: SHARDING["{architecture.line(name)}"] = "{role}", but {name} is a '
                    f"{type(module).__name__}, and this role is for nn.{_KINDS[role].__name__}; correct this line"
                )
            yield name, role
        elif any(True for _ in module.parameters(recurse=False)):
            raise UserError(f'model.file: SHARDING gives no role to "{name}", which has parameters; add a line for it')


def _style(role: str, job: Job, mesh: DeviceMesh, between: Placement) -> ParallelStyle:
    if role == "positions":
        return Whole(between, arrives=Replicate())
    if role == "norm":
        return Whole(between)
    if role == "head-norm":
        return Whole(Shard(2)) if job.model.qk_norm_over == "heads" else AcrossHeads()
    if role == "per-head":
        return PerHead()
    if role == "latent":
        return OnAll()
    if role == "shared-key":
        return SharedKey()
    if role == "gather":
        return Gathered(between)
    if role == "media":
        return Spread(between)
    if role == "tokens":
        return OwnTokens(between)
    if role == "per-token":
        return PerToken(Shard(1))
    if role == "stream":
        return PerToken(between)
    if role == "row":
        return Row(output_layouts=between)
    if role == "kv-column" and job.model.kv_heads % mesh.size():
        return CopiedHeads(job.model.heads, job.model.kv_heads)
    return Column()


def _pad_vocabulary(embed: Any, head: Any, rows: int, tied: bool) -> None:
    """Give the tables rows that no token uses, so that the vocabulary divides; neither loss nor files see them."""
    if embed is not None and rows != embed.num_embeddings:
        embed.num_embeddings = rows
        embed.weight = nn.Parameter(embed.weight.new_empty(rows, embed.embedding_dim))
    if head is not None and rows != head.weight.shape[0]:
        head.weight = embed.weight if tied else nn.Parameter(head.weight.new_empty(rows, head.weight.shape[1]))


class Column(ColwiseParallel):
    """A projection sharded by its outputs; of its adapter, A is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            placement: Placement = Replicate() if own == A else Shard(0)
            module.register_parameter(own, nn.Parameter(distribute_tensor(parameter, device_mesh, [placement])))


class Row(RowwiseParallel):
    """A projection sharded by its inputs; of its adapter, A is sharded like it and the rest is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[no-untyped-call]
        if isinstance(module, AdaptedLinear):
            module.lora_a = nn.Parameter(distribute_tensor(module.lora_a, device_mesh, [Shard(1)]))


def _kept(linear: AdaptedLinear, x_BSI: Tensor, draws: Draws) -> Tensor:
    """The dropout mask of an adapter's input, of which a rank has all or some channels."""
    x = cast(DTensor, x_BSI)
    mask_BSI = keep_mask(draws.inside(), linear.rate, linear.site, x.shape[1], x.shape[2])
    if x.placements != (Replicate(),):
        mask_BSI = mask_BSI.chunk(x.device_mesh.size(), dim=-1)[x.device_mesh.get_local_rank()]
    return DTensor.from_local(mask_BSI, x.device_mesh, x.placements, run_check=False)


class Gathered(ParallelStyle):
    """The module's first input arrives as the residual stream is placed and is gathered, once for all its users."""

    def __init__(self, between: Placement) -> None:
        super().__init__()
        self.between = between

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(inputs[0], device_mesh, [self.between], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(enter)
        return module


class Spread(ParallelStyle):
    """Every rank computes all of the module's result; where each then uses only its own slice of the stream, gradients
    of the result are summed over the ranks."""

    def __init__(self, between: Placement) -> None:
        super().__init__()
        self.between = between

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        if self.between != Replicate():
            module.register_forward_hook(leave)
        return module


class OwnTokens(ParallelStyle):
    """Every rank runs the module on its own tokens: those it has of the residual stream, or a slice of all of them."""

    def __init__(self, between: Placement) -> None:
        super().__init__()
        self.between = between

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def moved(x: Tensor, source: Placement, target: Placement) -> Tensor:
            return (
                DTensor.from_local(x, device_mesh, [source], run_check=False)
                .redistribute(placements=[target])
                .to_local()
            )

        if self.between == Replicate():
            module.register_forward_pre_hook(lambda _, inputs: (moved(inputs[0], Replicate(), Shard(1)), *inputs[1:]))
            module.register_forward_hook(lambda _, _inputs, output: moved(output, Shard(1), Replicate()))
        return module


class PerToken(ParallelStyle):
    """Every rank holds all parameters and applies them to tokens of its own, so that gradients are sums over ranks; or
    to all tokens, which gives every rank the same.

    On plain tensors: torch 2.11 cannot multiply a tensor that is sharded along its sequence.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.own = _as_every_rank_has_it if placement == Replicate() else _summed_over_ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = distribute_module(module, device_mesh)
        cast(Any, module).own = self.own
        return module


def _summed_over_ranks(parameter: Tensor) -> Tensor:
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


def _as_every_rank_has_it(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Whole(ParallelStyle):
    """Every rank holds all parameters and runs the module on its share of the activations, placed as given.

    Where each share is partial, the parameters' gradients are summed over the ranks.
    """

    def __init__(self, placement: Placement, arrives: Placement | None = None) -> None:
        super().__init__()
        self.placement, self.arrives = placement, arrives or placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, cast(Any, self._enter), cast(Any, self._leave))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.arrives], run_check=False)
        return (x.redistribute(placements=[self.placement]), *inputs[1:])

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


class AcrossHeads(ParallelStyle):
    """A norm over the heads of all ranks: gathered, normed, and every rank keeps its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, cast(Any, self._enter), cast(Any, self._leave))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *inputs[1:])

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[Shard(2)]).to_local()


class PerHead(ParallelStyle):
    """Every rank holds the numbers of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sinks = cast(Sinks, module)
        sinks.weight = nn.Parameter(distribute_tensor(sinks.weight, device_mesh, [Shard(0)]))
        sinks.own = lambda weight: cast(DTensor, weight).to_local()
        return module


class OnAll(ParallelStyle):
    """Every rank computes all of the module; its gradient is the sum of those of all ranks' heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, None, cast(Any, self._leave))

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        # Coming back through `from_local`, a partial gradient is summed before the module's own backward.
        return DTensor.from_local(output.to_local(), mesh, [Replicate()], run_check=False)


class SharedKey(ParallelStyle):
    """Every rank computes all of a projection, and its heads use all of it: its gradient is a part of the whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, None, cast(Any, self._leave))

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local(grad_placements=[Partial()])


class CopiedHeads(ParallelStyle):
    """Key or value heads that do not divide: every rank computes all of them and keeps one for each of its queries."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, None, cast(Any, self._leave))

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        # A rank's queries see only some of the heads, so its gradient of the projection is a part of the whole.
        local = output.to_local(grad_placements=[Partial()])
        mine = self.heads // mesh.size()
        queries = torch.arange(mine, device=local.device) + mesh.get_local_rank() * mine
        needed = queries // (self.heads // self.kv_heads)
        by_head = local.view(*local.shape[:-1], self.kv_heads, -1)
        return by_head.index_select(-2, needed).flatten(-2)
