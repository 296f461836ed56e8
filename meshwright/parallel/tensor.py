"""Tensor and sequence parallelism: every module's way to be cut, as DTensor styles.

Matrices are cut by columns, then by rows, so that one collective on either side serves the pair. Between blocks the
residual stream is whole on every rank, or with sequence parallelism cut along the sequence (dim 1).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from meshwright.job import Job
from meshwright.model import Decoder
from meshwright.model.attention import Attention
from meshwright.parallel.layout import padded_vocabulary
from meshwright.parallel.vocabulary import VocabularyParallelHead


def apply_tensor_parallel(model: Decoder, job: Job, mesh: DeviceMesh) -> None:
    """Cut a decoder (on the meta device) over the ranks of a mesh axis, in place; parameter names stay."""
    between = Shard(1) if job.layout.sp else Replicate()
    _pad_vocabulary(model, padded_vocabulary(job))
    _cut_vocabulary(model, job, mesh, between)
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_plan(cast(Any, block).attention, job, mesh, between))


def _block_plan(attention: Attention, job: Job, mesh: DeviceMesh, between: Placement) -> dict[str, ParallelStyle]:
    kv_heads_divide = job.model.kv_heads % mesh.size() == 0
    keys: ParallelStyle = ColwiseParallel() if kv_heads_divide else CopiedHeads(job.model.heads, job.model.kv_heads)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": Whole(between),
        "attention": Gathered(between, others=4),
        "attention.q": ColwiseParallel(),
        "attention.k": keys,
        "attention.v": keys,
        "attention.o": RowwiseParallel(output_layouts=between),
        "ffn_norm": Whole(between),
        "ffn": Gathered(between),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=between),
    }
    if job.model.activation == "swiglu":
        plan["ffn.gate"] = ColwiseParallel()
    if attention.q_norm is not None:
        plan["attention.q_norm"] = plan["attention.k_norm"] = Whole(Shard(2))  # heads are dim 2
    return plan


def _cut_vocabulary(model: Decoder, job: Job, mesh: DeviceMesh, between: Placement) -> None:
    assert model.embed is not None and model.final_norm is not None and model.head is not None
    parallelize_module(model.embed, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=between))
    if model.position_embed is not None:
        parallelize_module(model.position_embed, mesh, Whole(between, arrives=Replicate()))
    parallelize_module(model.final_norm, mesh, Whole(between))
    if job.model.tied:
        model.head.weight = cast(nn.Parameter, model.embed.weight)
    else:
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
    model.head = cast(Any, VocabularyParallelHead(model.head, mesh, job.model.vocab_size, between))


def _pad_vocabulary(model: Decoder, rows: int) -> None:
    """Give the tables rows that no token uses, so that the vocabulary divides; neither loss nor files see them."""
    assert model.embed is not None and model.head is not None
    if rows == model.embed.num_embeddings:
        return
    model.embed.num_embeddings = rows
    model.embed.weight = nn.Parameter(model.embed.weight.new_empty(rows, model.embed.embedding_dim))
    padded_head = model.embed.weight if model.shape.tied else nn.Parameter(torch.empty_like(model.embed.weight))
    model.head.weight = padded_head


class Gathered(PrepareModuleInput):
    """The module's first input arrives as the residual stream is placed and is made whole, once for all its users."""

    def __init__(self, between: Placement, others: int = 0) -> None:
        untouched = (None,) * others
        super().__init__(
            input_layouts=cast(Any, (between, *untouched)), desired_input_layouts=cast(Any, (Replicate(), *untouched))
        )


class Whole(ParallelStyle):
    """Every rank holds all parameters and runs the module on its share of the activations, placed as told.

    What the parameters' gradients lack is summed over the ranks where the share is a part.
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
