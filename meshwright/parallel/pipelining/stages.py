"""Pipeline stages: taken from the single-device model, and a forward pass through those of several ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.data import Batch
from meshwright.job import Job
from meshwright.model import Architecture, Decoder
from meshwright.model.sharding import ENTERING
from meshwright.parallel.inputs import Inputs
from meshwright.parallel.world import World


def keep_stage(architecture: Architecture, layers: range, first: bool, last: bool) -> None:
    """Remove everything from a model that is not part of a stage; what remains keeps its name.

    Lookups of tokens and positions and the encoder of pictures belong to the first stage, everything else outside the
    layers to the last; for extra tokens it has the embedding, too.
    """
    model = architecture.model
    blocks = model.layers
    assert isinstance(blocks, nn.ModuleDict)
    for name in [name for name in blocks if int(name) not in layers]:
        del blocks[name]
    for name, child in list(model.named_children()):
        if child is blocks or not any(True for _ in child.parameters()):
            continue
        role = architecture.role(name)
        looks_ahead = last and role == "vocabulary" and isinstance(model, Decoder) and model.shape.extra_tokens > 0
        if not looks_ahead and not (first if role in ENTERING else last):
            setattr(model, name, None)


class StageChain:
    """This rank's stages between their neighbours: what flows from one to the next, and which rank holds which."""

    def __init__(
        self,
        job: Job,
        world: World,
        stages: Mapping[int, nn.Module],
        stage_ranks: tuple[int, ...],
        compute: torch.dtype,
    ) -> None:
        assert world.mesh is not None
        self.group = world.mesh["pp"].get_group()
        self.compute = compute
        places = job.batch.sequence_length // world.axis_size("cp") // (world.axis_size("tp") if job.layout.sp else 1)
        self.hidden_shape = (job.batch.micro_batch, places, job.model.width)
        """Of what flows between stages."""
        self._rank, self._device = world.axis_rank("pp"), world.device
        self._stages, self._stage_ranks = stages, stage_ranks
        self._inputs = Inputs(job, world)

    @torch.no_grad()
    def held_out(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The loss sums of some batches, on the ranks of the last stage; zeros on the others.

        Hand-written because torch's pipeline runtime is bound to one table and one shape; stage by stage, each over all
        batches, so that the ranks work at the same time.
        """
        given = [self._inputs.held_out(batch) for batch in batches]
        results: list[Tensor] = [tokens for tokens, _ in given]
        sends: list[Any] = []
        last = len(self._stage_ranks) - 1
        for stage, module in self._stages.items():
            arriving: list[Any] = []
            if stage > 0 and self._stage_ranks[stage - 1] != self._rank:
                # All are requested before the first is sent on: between two ranks NCCL keeps the order of both
                # directions, and where they alternate each would hold its next send until the other receives.
                arriving, results = self._expected(batches, self._stage_ranks[stage - 1])
            for number, (_, arguments) in enumerate(given):
                if arriving:
                    arriving[number].wait()
                results[number] = module(results[number], **arguments)
                if stage < last and self._stage_ranks[stage + 1] != self._rank:
                    # The tensor is kept with its handle: it must outlive the transfer.
                    sent = results[number].contiguous()
                    sends.append((dist.isend(sent, group=self.group, group_dst=self._stage_ranks[stage + 1]), sent))
        for handle, _sent in sends:
            handle.wait()
        if self._stage_ranks[last] == self._rank:
            return results
        return [torch.zeros((), device=self._device) for _ in batches]

    def _expected(self, batches: Sequence[Batch], source: int) -> tuple[list[Any], list[Tensor]]:
        """Handles of receives from a rank, one for each batch, and the tensors they fill."""
        shape, handles, tensors = self.hidden_shape[1:], list[Any](), list[Tensor]()
        for batch in batches:
            hidden = torch.empty((len(batch), *shape), dtype=self.compute, device=self._device)
            handles.append(dist.irecv(hidden, group=self.group, group_src=source))
            tensors.append(hidden)
        return handles, tensors
