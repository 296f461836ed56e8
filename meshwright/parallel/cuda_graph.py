"""Forward and backward of a micro-batch as a CUDA graph: one launch instead of hundreds, where shapes are static.

For jobs whose host cannot launch kernels as fast as the GPU runs them: small models, small micro-batches. The graph
reads its inputs from fixed buffers and writes gradients to fixed memory, the same for every step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.parallel.weights import Weights
from meshwright.parallel.world import World

STEPS_BEFORE = 5
"""Steps without a graph: blocks are compiled, kernels chosen and the memory curve is recorded in them."""

BUFFERED = ("labels", "valid_count")
"""The arguments besides tokens that a graph has buffers for; a model that is given any other cannot be captured."""

Report = Callable[[str, str], None]
"""Told the state ("captured" or "off") and the reason."""


def why_no_graph(job: Job, world: World) -> str | None:
    """What excludes a job's micro-batches from being captured; None if nothing does."""
    model = job.model
    reasons = {
        "there is no CUDA device": world.device.type != "cuda",
        "several ranks communicate within a micro-batch": world.mesh is not None,
        "the host waits for the number of tokens of each expert": model.experts is not None,
        "dropout is keyed by the step on the host": bool(model.dropout or (model.adapter and model.adapter.dropout)),
        "documents change the shapes of attention": job.data.mask_documents,
        'shapes change with data.packing = "none"': job.data.packing == "none",
        "pictures, film and sound have inputs of their own": model.encoder is not None,
        "preferences need sums of each step's pairs": job.prefers,
        "extra tokens have inputs of their own": model.extra_tokens > 0,
        "offload copies between host and device": bool(job.memory.offload),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def steps_until_captured(job: Job, world: World) -> int:
    """The steps after which a job's micro-batches are graphs, if nothing unforeseen prevents it; 0 without graphs."""
    return STEPS_BEFORE + 1 if job.run.cuda_graph and why_no_graph(job, world) is None else 0


class MicroBatchGraph:
    """A model's forward and backward, captured after some steps; whatever prevents that is reported, and training
    continues without."""

    def __init__(self, model: nn.Module, weights: Weights, report: Report) -> None:
        self._model, self._weights, self._report = model, weights, report
        self._tokens = self._labels = self._count = torch.empty(0)
        self._gradients: dict[str, Tensor | None] = {}
        # The first micro-batch of a step writes gradients, later ones add to them.
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._losses: dict[bool, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._off = False

    def run(self, tokens: Tensor, arguments: Mapping[str, Any], *, first: bool) -> Tensor | None:
        """The loss of a micro-batch, whose gradients the masters have then; None if it was not run."""
        if self._off or (self._graphs and tokens.shape != self._tokens.shape):
            return None
        if unread := [name for name, value in arguments.items() if value is not None and name not in BUFFERED]:
            self._off = True
            self._report("off", f"the model is given {', '.join(unread)}, which a graph does not read")
            return None
        if first not in self._graphs and not self._capture(tokens, arguments, first):
            return None
        self._fill(tokens, arguments)
        self._graphs[first].replay()
        if first:
            self._give_gradients(self._gradients)
        return self._losses[first].clone()

    def _capture(self, tokens: Tensor, arguments: Mapping[str, Any], first: bool) -> bool:
        before = {name: master.grad for name, master in self._weights.masters.items()}
        try:
            if first:
                self._make_buffers(tokens, arguments)
                self._warm_up()
            graph = torch.cuda.CUDAGraph()
            # Other threads pin memory for the next batches meanwhile, which is no part of the graph.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._losses[first] = self._forward_and_backward()
        except Exception as error:  # kernels and libraries fail in many ways if they cannot be captured
            self._off = True
            self._graphs.clear()
            self._give_gradients(before)
            self._report("off", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return False
        if first:
            self._gradients = {name: master.grad for name, master in self._weights.masters.items()}
        self._graphs[first] = graph
        self._report("captured", "first micro-batch of a step" if first else "later micro-batches of a step")
        return True

    def _make_buffers(self, tokens: Tensor, arguments: Mapping[str, Any]) -> None:
        self._tokens, self._labels = tokens.clone(), arguments["labels"].clone()
        self._count = torch.zeros((), device=tokens.device)
        self._fill(tokens, arguments)

    def _fill(self, tokens: Tensor, arguments: Mapping[str, Any]) -> None:
        self._tokens.copy_(tokens)
        self._labels.copy_(arguments["labels"])
        self._count.fill_(arguments["valid_count"])

    def _warm_up(self) -> None:
        """Once on the capturing stream, so that libraries have made what they keep for each stream."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._forward_and_backward()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._give_gradients({})

    def _forward_and_backward(self) -> Tensor:
        loss: Tensor = self._model(self._tokens, labels=self._labels, valid_count=self._count)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _give_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        for name, master in self._weights.masters.items():
            master.grad = gradients.get(name)
