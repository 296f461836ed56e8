"""Recomputation of blocks: forwards that drop what they can recompute.

A block's forward is replaced, not wrapped in a module: parameters keep their names, hooks of tensor parallelism inside
a block run again with it, those of `fully_shard` around it do not. A segment's blocks are called as modules in forward,
and by their forwards when they are recomputed: `fully_shard` would free the parameters after each of them, and gather
them again for its backward. They are gathered here instead, and freed after their backward.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.cost import KEPT_OPERATIONS, PROJECTIONS, Mode, segments_of
from meshwright.model import Decoder
from meshwright.model.adapter import AdaptedLinear
from meshwright.model.attention import Attention
from meshwright.model.block import ExtraBlock
from meshwright.model.feedforward import FeedForward
from meshwright.model.moe import MixtureOfExperts
from meshwright.torch_private.autograd import in_backward, let_sharded_modules_be_recomputed


def apply_recompute(model: nn.Module, modes: Mapping[int, Mode], *, keep_last: bool, prefetch: int = 1) -> None:
    """Let the blocks of a model recompute, each in its mode, in place.

    `keep_last` says whether something after a block's last projection needs its result; `prefetch` how many
    blocks of a segment gather their parameters ahead.
    """
    if "segment" in modes.values():
        _recompute_segments(model, modes, prefetch)
        return
    for name, block in cast(nn.ModuleDict, model.layers).items():
        if (mode := modes[int(name)]) == "full":
            recompute_block(block)
        elif mode == "selective":
            let_sharded_modules_be_recomputed()
            ranks = {m.lora_a.shape[0] for m in block.modules() if isinstance(m, AdaptedLinear)}
            contexts = partial(_selective_contexts, 0 if keep_last else _projections(block), ranks)
            block.forward = _recomputing(block.forward, {"context_fn": contexts})


def recompute_block(block: nn.Module) -> None:
    """Let a block keep only its input and recompute the rest, in place."""
    block.forward = _recomputing(block.forward, {})


def _recompute_segments(model: nn.Module, modes: Mapping[int, Mode], prefetch: int) -> None:
    assert isinstance(model, Decoder), "require_recompute refuses models that call their blocks themselves"
    names = list(model.layers)
    model.segments = [names[own.start : own.stop] for own in segments_of([modes[int(name)] for name in names])]
    model.run_segment = _recomputing(model.run_segment, {})  # type: ignore[method-assign]
    model.run_block = partial(_block_of, model, prefetch)  # type: ignore[method-assign]


def _block_of(model: Decoder, prefetch: int, name: str) -> Callable[..., Tensor]:
    """What runs a block of a segment: the module, or in a recomputation its forward, once its parameters are there."""
    block = model.layers[name]
    if not in_backward() or not isinstance(block, FSDPModule):
        return block
    assert model.segments is not None
    segment = next(names for names in model.segments if name in names)
    place = segment.index(name)
    for ahead in segment[place : place + 1 + prefetch]:
        handle = cast(FSDPModule, model.layers[ahead]).unshard(async_op=True)
        if ahead == name and handle is not None:
            handle.wait()
    return cast(Callable[..., Tensor], block.forward)


def _projections(block: nn.Module) -> int:
    """Products of a block's forward, of which the last one's result need not be kept; 0 if all are needed."""
    if any(isinstance(module, MixtureOfExperts) for module in block.modules()):
        return 0  # their number depends on the experts, and the last one's result is weighted
    if isinstance(block, ExtraBlock):
        return 0  # a norm follows the last one
    fused = sum(module.fused_away for module in block.modules() if isinstance(module, Attention | FeedForward))
    return sum(isinstance(module, nn.Linear) for module in block.modules()) - fused


def _recomputing(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Dropout is keyed by where and when it is used, so there is no generator state to restore.
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)
        return result

    return run


def _selective_contexts(last: int, ranks: Container[int]) -> Any:
    """Torch's contexts for one pass through a block; the projection of this number is not kept, 0 keeps them all.

    Products with an adapter's matrices, known by its rank, are not counted, and recomputed: they are cheap.
    """
    seen: Counter[bool] = Counter()

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(operation).endswith(".out"):  # compiled parts of a block write products into memory that they use again
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = _name(operation)
        if name in PROJECTIONS and isinstance(args[-1], Tensor) and any(side in ranks for side in args[-1].shape):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in PROJECTIONS:
            seen[context.is_recompute] += 1  # some versions of torch ask again while recomputing
        needless = name in PROJECTIONS and seen[context.is_recompute] == last
        keep = name in KEPT_OPERATIONS and not needless
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]


@cache
def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation))
