"""What a rank observes of a run: the real training loop with a listener."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import routers
from meshwright.model.adapter import A, B
from meshwright.model.quantised_linear import SCALES
from meshwright.parallel import Engine, ShardIndex, Weights, build, join_world, quantised_linears, table_error
from meshwright.ranks import ALONE, own_place
from meshwright.torch_private.compiler import generate_plain_code
from meshwright.train import Answers, LossScale, answers_of, find_references, held_out_batches, make_trainer
from meshwright.verify.documents import unequal_corpus
from meshwright.verify.replay import Choices, Recording, Replayed, Replaying, routes

MATRIX_SCALE = 8.0
VECTOR_SHIFT = 0.01
ADAPTER_SCALE = 0.1
"""Products of an adapter are then about as large as the weights they are added to."""
METRICS = frozenset(
    (
        *("expert_imbalance", "expert_entropy", "idle_experts", "expert_dropped", "extra_loss"),
        *("reward_chosen", "reward_rejected", "preference_accuracy", "val_accuracy"),
    )
)
"""Numbers of a run's rows that describe the whole step, whatever the layout."""
LOSS_SCALE = 2.0**10
"""fp16's initial loss scale: gradients of small models are large, and with the usual one the first steps overflow."""


@dataclass(frozen=True)
class Shard:
    """A rank's values of one parameter and where they are in the whole."""

    index: ShardIndex
    values: Tensor


@dataclass
class Observation:
    """One rank's view of the first steps of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """Of held-out pairs of answers at every evaluation, if the job learns from them."""
    answers: Answers | None = None
    """Of one process: what the model gives held-out pairs before the first step."""
    gradients: dict[str, Shard] = field(default_factory=dict)
    """Of the first step, as they are before clipping, without the loss scale of fp16."""
    updates: dict[str, Shard] = field(default_factory=dict)
    """The parameters at the end minus those at the start."""
    sizes: dict[str, float] = field(default_factory=dict)
    """The norms of this rank's parameters at the start."""
    preferences: dict[str, Shard] = field(default_factory=dict)
    """What every router prefers at the end, which is no parameter: `balance_rate` moves it."""
    choices: Choices | None = None
    """Of a mixture of experts in one process: which experts every token was sent to."""
    replayed: Replayed | None = None
    """Of a mixture that was given the choices of another run."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Every other number that a run logs of a step or an evaluation, by its column."""
    fused: dict[str, int] = field(default_factory=dict)
    """Products that ran fused with their message on this CPU rank, by torch's name of the operation."""


def observe(
    job: Job,
    master: torch.dtype | None,
    device: str = "cpu",
    choices: Choices | None = None,
    make: Callable[..., Any] = make_trainer,
    change: Callable[[Weights, Sequence[nn.Module]], None] | None = None,
) -> Observation:
    """Train the job on this rank, in its place in the world and in the loop that `make` creates; return what was
    observed. Tokens go to the experts of `choices` if they are given; `change` may alter the initial weights and the
    modules."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without 16-bit products is only slower
    if job.run.compiles and device == "cpu":
        generate_plain_code()
    world = join_world(job, _own_device(device))
    routing: Recording | Replaying | None = None
    if choices is not None:
        routing = Replaying(choices, world.device)
    elif routes(job) and world.size == 1:
        routing = Recording()
    world = replace(world, replay=routing)
    engine, weights = build(job, world, master)
    if routing is not None:
        routing.watch(engine.modules)
    corpus = unequal_corpus(job)
    # By the weights before they change, so that the first step already compares two different models.
    references = find_references(job, corpus, cast(Engine, engine), world) if job.prefers else None
    enliven(weights, engine.modules)
    if change is not None:
        change(weights, engine.modules)
        weights.refresh()
    seen = Observation()
    if job.prefers and world.size == 1:
        seen.answers = answers_of(cast(Engine, engine), held_out_batches(job, corpus), world)
    listener = _Listener(seen)
    _record_first_gradients(weights, seen)
    before = _values(weights)
    seen.sizes = {name: float(values.norm()) for name, values in before.items()}
    training = make(job, corpus, engine, weights, listener, listener, world)
    if references is not None:
        training.refer_to(references)
    if training.scaling.dynamic:
        training.scaling = LossScale(LOSS_SCALE)
    scale = training.scaling.scale
    training.run()
    seen.gradients = {name: Shard(held.index, held.values / scale) for name, held in seen.gradients.items()}
    shards = weights.shards()
    seen.updates = {name: Shard(shards[name], after - before[name]) for name, after in _values(weights).items()}
    seen.preferences = _preferences(job, engine.modules)
    seen.choices = routing.choices if isinstance(routing, Recording) else None
    seen.replayed = routing.replayed if isinstance(routing, Replaying) else None
    seen.fused = _fused_products(job)
    return seen


def observe_own(
    job: Job, master: torch.dtype | None, device: str = "cpu", choices: Choices | None = None
) -> Observation:
    """As `observe`, for a model sharded by its own table: a failure names the line to look at."""
    logging.disable(logging.CRITICAL)  # torch logs the traceback of some failures itself
    try:
        return observe(job, master, device, choices)
    except UserError:
        raise
    except Exception as error:
        raise table_error(job, error) from error


def _fused_products(job: Job) -> dict[str, int]:
    if not job.layout.async_tp:
        return {}
    from meshwright.parallel.async_tensor import fused_calls  # imports the compiler

    return dict(fused_calls)


@torch.no_grad()
def enliven(weights: Weights, modules: Sequence[nn.Module]) -> None:
    """Change the initial weights so that bugs show.

    They are drawn for wide models: at this width attention would be nearly uniform, its gradients close to zero, and
    with biases at zero and norms at one, code that adds a bias twice or forgets a norm's weight would compute the same.
    An adapter's B starts at zero, and as long as it is zero, its A has no gradient. Nothing is overwritten, so that a
    wrong initial value stays wrong.
    """
    shards = weights.shards() | dict(weights.frozen_shards)
    for name, tensor in (*weights.masters.items(), *weights.frozen.items()):
        if name.endswith(f".{B}"):
            tensor.add_(shards[name].take(ADAPTER_SCALE * _waves(*shards[name].shape)).to(tensor.device))
        elif tensor.dim() > 1 and tensor.is_floating_point() and not name.endswith(f".{A}"):
            tensor.mul_(MATRIX_SCALE)
        elif tensor.dim() == 1:
            tensor.add_(shards[name].take(VECTOR_SHIFT * _waves(shards[name].shape[0])).to(tensor.device))
    weights.refresh()
    for linear in quantised_linears(modules).values():
        linear.get_buffer(SCALES).mul_(MATRIX_SCALE)


def _waves(*shape: int) -> Tensor:
    """Numbers between -1 and 1, no two rows alike."""
    return torch.cos(torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)


def _own_device(kind: str) -> torch.device:
    """The CPU, or this rank's GPU; ranks share GPUs if there are more ranks."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, (own_place() or ALONE).local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _values(weights: Weights) -> dict[str, Tensor]:
    return {name: master.detach().clone().cpu() for name, master in weights.masters.items()}


def _preferences(job: Job, modules: Sequence[nn.Module]) -> dict[str, Shard]:
    if not routes(job):
        return {}
    preferences = {layer: router.preference for module in modules for layer, router in routers(module)}
    return {
        f"layers.{layer}.moe.router.preference": Shard(
            ShardIndex(torch.arange(len(preference)), None, tuple(preference.shape), 1), preference.cpu()
        )
        for layer, preference in preferences.items()
    }


def _record_first_gradients(weights: Weights, seen: Observation) -> None:
    """Copy the gradients when the loop first has them complete; a master without one counts as zero."""
    collect: Callable[[], None] = weights.collect_gradients

    def collect_and_record() -> None:
        collect()
        if not seen.gradients:
            shards = weights.shards()
            for name, master in weights.masters.items():
                gradient = torch.zeros_like(master) if master.grad is None else master.grad
                seen.gradients[name] = Shard(shards[name], gradient.detach().to(master.dtype, copy=True).cpu())

    weights.collect_gradients = collect_and_record  # type: ignore[method-assign]


class _Listener:
    """Recorder and progress of a run that keep the numbers to be compared."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen

    def metric(self, row: dict[str, Any]) -> None:
        if "val_loss" in row:
            self._seen.evaluations.append(row["val_loss"])
            self._seen.margins += [row["val_margin"]] if "val_margin" in row else []
        else:
            self._seen.losses.append(row["loss"])
            self._seen.norms.append(row["grad_norm"])
        for name in METRICS & row.keys():
            self._seen.metrics.setdefault(name, []).append(row[name])

    def event(self, kind: str, **fields: Any) -> None:
        """Events are not compared."""

    def sample(self, step: int, text: str) -> None:
        """Synthetic tokens have no text."""

    def step(self, row: dict[str, Any]) -> None:
        """Nobody watches."""

    def evaluation(self, step: int, val_loss: float) -> None:
        """Nobody watches."""

    def message(self, text: str) -> None:
        """Nobody watches."""
