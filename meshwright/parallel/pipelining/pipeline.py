"""The pipeline: our schedule's table, run by torch's pipeline runtime over this rank's stages.

Gradients stay unsharded on every stage until the last micro-batch (torch reduces them once, at the step's end), so
under a pipeline zero 2 holds as much as zero 1.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import GraphExecGroup

from meshwright.data import Batch, Step
from meshwright.job import Job
from meshwright.model import Decoder
from meshwright.model.numbers import wide_dtype
from meshwright.parallel.engine import Range
from meshwright.parallel.inputs import Inputs
from meshwright.parallel.pipelining.dualpipe import in_torchs_words, lower, torch_number, torch_numbers, torch_ranks
from meshwright.parallel.pipelining.receiving import allocate_buffers, release_buffers
from meshwright.parallel.pipelining.stages import StageChain
from meshwright.parallel.weights import Weights
from meshwright.parallel.world import World
from meshwright.pipeline import Action, Kind, Table
from meshwright.torch_private.pipelining import PipelineRuntime, gradient_node
from meshwright.torch_private.sharding import widen_gradients

Listener = Callable[[Action, float, float, int], None]
"""Called for every action with its start and end and how many micro-batches' activations the rank holds after it."""

TORCH_FORGETS_NODES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
"""Before 2.13 torch drops a stage's graph between the halves of a backward and keeps only the nodes where the second
begins; those of functions written in Python do not survive that, so the graph is kept for them."""

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "backward of weights",
}


class Pipeline:
    """This rank's stages and the table by which they run."""

    def __init__(
        self, job: Job, world: World, stages: dict[int, nn.Module], weights: Weights, table: Table, compute: torch.dtype
    ) -> None:
        self.modules = list(stages.values())
        self._job, self._device, self._weights, self._table = job, world.device, weights, table
        self.inputs = Inputs(job, world)
        whole = {stage: module for stage, module in stages.items() if stage in table.chains[0]}
        self._chain = StageChain(job, world, whole, table.stage_ranks[: len(table.chains[0])], compute)
        self._stages = [self._stage(stage, module, world) for stage, module in stages.items()]
        self._micro_batches = table.micro_batches // table.parameter_copies
        self._schedule = _TableRuntime(  # type: ignore[no-untyped-call]
            self._stages, self._micro_batches, loss_fn=lambda loss, _target: loss, scale_grads=False
        )
        self._schedule.follow(table)

    def _stage(self, stage: int, module: nn.Module, world: World) -> "_Stage":
        """A stage with known shapes: torch would otherwise find them by running every stage once."""
        tokens = (self._job.batch.micro_batch, self._job.batch.sequence_length // world.axis_size("cp"))
        chain, stages = self._chain, self._table.chain_of(stage)
        hidden = torch.empty(chain.hidden_shape, dtype=chain.compute, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=wide_dtype(chain.compute), device="meta", requires_grad=True)
        return _Stage(
            self._table,
            stage,
            module,
            world.device,
            input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if stage == stages[0] else hidden,
            output_args=loss if stage == stages[-1] else hidden,
            group=chain.group,
        )

    def watch(self, listener: Listener) -> None:
        """Report every action of the coming steps."""
        stages = self._stages
        for stage in stages:
            stage.listener = listener
            stage.holding = lambda: sum(len(each.fwd_cache) + len(each.backward_state) for each in stages)

    def named(self, name: Range | None) -> None:
        """Ranges around every action of the table."""
        for stage in self._stages:
            stage.range_of = name or nullcontext

    def accumulate(self, data: Step, step: int) -> Tensor:
        """Run the table once; the loss is on the ranks of a last stage, and zero on the others."""
        step_tensor = torch.tensor(step)
        micro_batches = data.batch.split(self._job.batch.micro_batch)
        given = [self.inputs.training(micro, data.valid_count, step_tensor) for micro in micro_batches]
        for stage in self._stages:
            stage.given = [given[number] for number in stage.micro_batches]
        losses: list[Tensor] = []
        # The loss is computed inside the last stage; torch requires a target anyway and passes it to an identity.
        self._schedule.step(target=torch.zeros(self._micro_batches), losses=losses, return_outputs=False)
        self._weights.collect_gradients()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self._device)

    def held_out(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The loss sums of some batches, on the ranks of the last stage."""
        return self._chain.held_out(batches)


class _Stage(PipelineStage):
    """Torch's stage, first and last within its chain, with each micro-batch's tokens and arguments from our side, and
    with memory for what it receives only while that is needed.

    Torch passes keyword arguments to its backward too, where version 2.11 fails on what is not a tensor.
    """

    given: list[tuple[Tensor, dict[str, Any]]]
    """Tokens and arguments of every micro-batch of its chain."""
    listener: Listener | None = None
    holding: Callable[[], int]
    range_of: Range
    _current: dict[str, Any]

    def __init__(self, table: Table, stage: int, module: nn.Module, device: torch.device, **kwargs: Any) -> None:
        self.stage, self.micro_batches = stage, table.micro_batches_of(stage)
        self.range_of = nullcontext
        self._chain = table.chain_of(stage)
        super().__init__(module, torch_number(table, stage), torch_numbers(table), device, **kwargs)
        self._graphs: dict[int, list[Any]] = {}

    @property
    def is_first(self) -> bool:
        """Whether micro-batches enter here."""
        return self.stage == self._chain[0]

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self._chain[-1]

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module with the current micro-batch's arguments."""
        return self.submod(*args, **self._current)

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *rest: Any, **kwargs: Any) -> Any:
        """Torch's forward of one micro-batch; its own tokens replace what torch was given."""
        tokens, self._current = self.given[fwd_chunk_id]
        result = self._report(Kind.FORWARD, fwd_chunk_id, super().forward_one_chunk, (tokens,), *rest, **kwargs)
        release_buffers(self.args_recv_info[fwd_chunk_id])
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        """Torch's whole backward, or its half for the inputs."""
        kind = Kind.BACKWARD if full_backward else Kind.INPUT
        if not full_backward and TORCH_FORGETS_NODES:
            self._graphs[bwd_chunk_id] = [out.view_as(out).grad_fn for out in self.fwd_cache[bwd_chunk_id][0]]
        run = super().backward_one_chunk
        result = self._report(kind, bwd_chunk_id, run, *args, full_backward=full_backward, **kwargs)
        release_buffers(self.grad_recv_info[bwd_chunk_id])
        return result

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Torch's backward; its halves would add the gradients of micro-batches in the compute format."""
        table = self._extra_table() if backward_type == "input" else None
        if table is None:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        else:
            result = self._input_half(table, bwd_kwargs, last_backward)
        if backward_type != "full" and isinstance(self.submod, FSDPModule):
            widen_gradients(self.submod)
        return result

    def _input_half(
        self, table: Tensor, bwd_kwargs: dict[str, Any], last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Torch's half for the inputs, which also computes the gradient of the table of extra tokens."""
        # The half for the weights starts at every use of a parameter and runs back to it. A tied
        # head uses the table that extra tokens look up: from the head of an extra token the way to
        # its lookup leads through its block, and from the second lookup through the first block.
        # Torch would run that block for the table and again for its own weights, whose graph is
        # gone by then.
        inputs = bwd_kwargs["input_values"]
        gradients, groups = super().backward_maybe_with_nosync(
            "input", bwd_kwargs | {"input_values": [*inputs, table]}, last_backward
        )
        node = gradient_node(table)
        assert groups is not None
        for group in groups:
            group["params"].discard(node)
        return gradients[: len(inputs)], [group for group in groups if group["params"]]

    def _extra_table(self) -> Tensor | None:
        """The embedding of a last stage, which extra tokens look up."""
        if self.is_first or not isinstance(self.submod, Decoder) or self.submod.embed is None:
            return None
        table = self.submod.embed.weight
        return table if table.requires_grad else None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Torch's half of the backward for the weights."""
        run = self._whole_backward if self.is_first else super().backward_weight_one_chunk
        # Torch runs a backward for every group of weights; run together they recompute a block once, not once each.
        with GraphExecGroup():
            result = self._report(Kind.WEIGHT, bwd_chunk_id, run, *args, **kwargs)
        self._graphs.pop(bwd_chunk_id, None)
        return result

    def _whole_backward(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        # A first stage has no input to give a gradient to: torch leaves all of its backward to the weights' half, but
        # knows such a stage by the number 0, which only the first chain's has.
        input_values, _, stage_output, output_grads = self.backward_state.pop(bwd_chunk_id)
        whole = {"stage_output": stage_output, "output_grads": output_grads, "input_values": input_values}
        self.backward_maybe_with_nosync("full", whole, last_backward=last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's receive of a micro-batch's hidden states."""
        allocate_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's receive of their gradients."""
        allocate_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for received in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            release_buffers(received)
        return result

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # A rank of a V holds two neighbouring stages; torch 2.11 would have it send to itself.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _report(self, kind: Kind, micro_batch: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        with self.range_of(f"{_NAMES[kind]} {self.micro_batches[micro_batch]}, stage {self.stage}"):
            result = run(micro_batch, *args, **kwargs)
        if self.listener is not None:
            action = Action(kind, self.micro_batches[micro_batch], self.stage)
            self.listener(action, started, time.perf_counter(), self.holding())
        return result


class _TableRuntime(PipelineRuntime):
    """Torch's runtime for any table."""

    def follow(self, table: Table) -> None:
        """Run this table from now on; torch finds the transfers of one chain itself."""
        if len(table.chains) == 1:
            orders = enumerate(table.orders)
            self._prepare_schedule_with_comms({rank: [in_torchs_words(table, a) for a in o] for rank, o in orders})
            return
        self.pipeline_order_with_comms = lower(table)
        ranks = torch_ranks(table)
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks
