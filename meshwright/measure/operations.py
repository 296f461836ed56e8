"""What a calibration measures on a CPU alone: operations between products, small decoders, whole updates.

On a GPU memory traffic and launches bound these. A CPU computes exponentials more slowly than it moves memory, gets new
memory page by page, and makes every call itself: so each operation is measured, with the trainer's own code and in
chains, whose results stay until the backward as a step's do.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.hardware.profile import Decoder, Operation, OperationName
from meshwright.job import Job
from meshwright.measure.calibrate_shapes import DecoderModel, DecoderShape
from meshwright.measure.stopwatch import Stopwatch
from meshwright.measure.together import Together
from meshwright.model import Draws
from meshwright.model.dropout import dropout
from meshwright.model.norm import RMSNorm
from meshwright.model.numbers import DTYPES
from meshwright.model.rotary import apply_rotary
from meshwright.parallel import World, build, join_world
from meshwright.parallel.weights import norm
from meshwright.train import clip_gradients

LENGTH = 8
"""Calls of a chain: as many as keep the results of some layers alive at the same time."""
_LARGE = 2**21
"""Entries from which a chain has half as many calls."""
_REPEATS = 5
_DECODER_REPEATS = 15
_DECODER_WARMUP = 3
_ROTATED_HEADS = 8
_SMALL_TABLE = 512
_SEQUENCE = 16

Call = Callable[[Tensor], Tensor]
Seconds = tuple[float, float]
"""Of a forward and its backward."""


def measured_operation(name: OperationName, dtype: str, rows: int, width: int, watch: Stopwatch) -> Operation:
    """One operation's row of a profile: medians over chains of it."""
    form = DTYPES[dtype]
    if name in ("fill", "embedding"):
        forward_s, backward_s = _alone_s(name, form, rows, width, watch)
    else:
        forward_s, backward_s = _chain_s(*_calls(name, form, rows, width), watch=watch)
    return Operation(name=name, dtype=dtype, rows=rows, width=width, forward_s=forward_s, backward_s=backward_s)


def _calls(name: OperationName, form: torch.dtype, rows: int, width: int) -> tuple[Tensor, list[Call], list[Tensor]]:
    """An input, a chain of calls from it that keep its shape, and what else has gradients."""
    length = LENGTH if rows * width < _LARGE else LENGTH // 2
    x = torch.randn(1, rows, width, dtype=form)
    if name == "rotary":
        x = torch.randn(1, max(1, rows // _ROTATED_HEADS), _ROTATED_HEADS, width, dtype=form)
        angles = torch.randn(1, x.shape[1], 1, width // 2)
        tables = angles.cos(), angles.sin()
        return x, [lambda y: apply_rotary(y, tables)] * length, []
    if name == "swiglu":
        ups: list[Tensor] = [torch.randn_like(x).requires_grad_() for _ in range(length)]
        return x, [_gated(up) for up in ups], ups
    if name == "dropout":
        draws = Draws(1, torch.tensor(1), torch.arange(1))
        return x, [lambda y: dropout(y, 0.1, draws, 0)] * length, []
    if name in ("rmsnorm", "layernorm"):
        module: nn.Module = (RMSNorm(width, 1e-5) if name == "rmsnorm" else nn.LayerNorm(width)).to(form)
        return x, [module] * length, list(module.parameters())
    if name == "bias":
        bias = torch.randn(width, dtype=form, requires_grad=True)
        return x, [lambda y: y + bias] * length, [bias]
    other, factor = torch.randn_like(x), torch.tensor(0.9, dtype=form)
    calls: dict[str, Call] = {
        "gelu": lambda y: F.gelu(y, approximate="tanh"),
        "sum": lambda y: y + other,
        "scale": lambda y: factor * y,
    }
    return x, [calls[name]] * length, []


def _gated(up: Tensor) -> Call:
    return lambda gate: F.silu(gate) * up


def _chain_s(x: Tensor, calls: list[Call], others: list[Tensor], *, watch: Stopwatch) -> Seconds:
    """Median seconds of one call's forward and backward."""
    grad = torch.randn_like(x)

    def once() -> Seconds:
        leaf = x.detach().requires_grad_()
        began = time.perf_counter()
        y = leaf
        for call in calls:
            y = call(y)
        middle = time.perf_counter()
        torch.autograd.grad(y, [leaf, *others], grad)
        return middle - began, time.perf_counter() - middle

    return _medians(once, len(calls), watch)


def _alone_s(name: str, form: torch.dtype, rows: int, width: int, watch: Stopwatch) -> Seconds:
    """The same for calls that cannot follow each other: new zeros, and rows of a table."""
    table = torch.randn(_SMALL_TABLE, width, dtype=form, requires_grad=True)
    places, grad = torch.randint(_SMALL_TABLE, (rows,)), torch.randn(rows, width, dtype=form)

    def once() -> Seconds:
        began = time.perf_counter()
        if name == "fill":
            kept = [torch.zeros(rows, width, dtype=form) for _ in range(LENGTH)]
            return time.perf_counter() - began, 0.0 * len(kept)
        looked_up = [F.embedding(places, table) for _ in range(LENGTH)]
        middle = time.perf_counter()
        for one in looked_up:
            torch.autograd.grad(one, table, grad)
        return middle - began, time.perf_counter() - middle

    return _medians(once, LENGTH, watch)


def _medians(once: Callable[[], Seconds], calls: int, watch: Stopwatch) -> Seconds:
    once()
    taken: list[Seconds] = []
    began, spent = time.perf_counter(), watch.together.most()
    while len(taken) < _REPEATS or spent < watch.goal_s:
        taken.append(once())
        spent = watch.together.most(time.perf_counter() - began)
        if len(taken) >= 2 and spent > 4 * watch.goal_s:
            break
    forwards, backwards = (watch.together.most(statistics.median(times)) for times in zip(*taken, strict=True))
    return forwards / calls, backwards / calls


def update_call(parameters: int, tensors: int) -> Callable[[int], object]:
    """What a step does with gradients it has: their norm, clipping, and torch's fused AdamW."""
    width = min(256, parameters // tensors)
    masters = [nn.Parameter(torch.randn(parameters // tensors // width, width)) for _ in range(tensors)]
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer = torch.optim.AdamW(masters, fused=True)

    def call(_: int) -> None:
        torch.stack([norm(master.grad, master.dtype) for master in masters if master.grad is not None])
        clip_gradients(masters, 1.001, 1.0)  # a factor near 1, so that gradients stay normal numbers
        optimizer.step()

    return call


def measured_decoders(group: Sequence[DecoderShape], device: torch.device, together: Together) -> Iterator[Decoder]:
    """Small decoders' rows of a profile.

    They take turns: what counts is by how much they differ, and a machine is not equally fast all the time.
    """
    steps = [_decoder_step(shape, device, together) for shape in group]
    taken: list[list[Seconds]] = [[] for _ in group]
    for _ in range(_DECODER_REPEATS + _DECODER_WARMUP):
        for times, step in zip(taken, steps, strict=True):
            times.append(step())
    for (model, recompute, zero), times in zip(group, taken, strict=True):
        forward_s, backward_s = (
            together.most(statistics.median(one)) for one in zip(*times[_DECODER_WARMUP:], strict=True)
        )
        fields = {"model": _sized(model), "sequence_length": _SEQUENCE, "recompute": recompute, "zero": zero}
        yield Decoder.model_validate(fields | {"forward_s": forward_s, "backward_s": backward_s})


def _sized(model: DecoderModel) -> DecoderModel:
    return {**model, "max_sequence_length": _SEQUENCE}


def _decoder_step(shape: DecoderShape, device: torch.device, together: Together) -> Callable[[], Seconds]:
    """A micro-batch of a decoder, on each rank for itself or by layout.zero over all of them."""
    model, recompute, zero = shape
    ranks = 1 if zero is None else together.ranks
    layout = {} if zero is None else {"zero": zero, ("dp_shard" if zero else "dp_replicate"): ranks}
    job = Job.model_validate(
        {
            "model": _sized(model),
            "batch": {"sequence_length": _SEQUENCE, "global_batch": ranks, "micro_batch": 1},
            "memory": {"recompute": recompute},
            "layout": layout,
        }
    )
    engine, weights = build(job, World(device) if zero is None else join_world(job, device))
    decoder = engine.modules[0]
    tokens = torch.randint(job.model.vocab_size, (1, _SEQUENCE))
    steps = itertools.count()

    def once() -> Seconds:
        weights.start_step(next(steps))
        weights.start_micro_batch(last=True)
        together.most()
        began = time.perf_counter()
        loss = decoder(tokens, labels=tokens, valid_count=float(_SEQUENCE))
        middle = time.perf_counter()
        loss.backward()
        weights.collect_gradients()
        ended = time.perf_counter()
        weights.zero_gradients()
        return middle - began, ended - middle

    return once
