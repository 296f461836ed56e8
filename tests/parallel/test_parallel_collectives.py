"""What tensor parallelism communicates: collectives and bytes a layer, and what cutting the other way round costs."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.job import Job
from meshwright.parallel import build, join_world
from meshwright.verify.ranks import run_ranks

B, S, D, T = 2, 16, 32, 2


class Collectives(TorchDispatchMode):
    """Counts functional collectives and the bytes of the whole tensor each works on."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and not re.search("wait|wrap", func._opname):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            self.count[func._opname] += 1
            self.bytes[func._opname] += max(t.numel() * t.element_size() for t in tensors)
        return result


def layer_traffic(sp: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives and bytes that one more layer adds to a training pass."""
    seen = []
    for layers in (1, 2):
        job = Job.model_validate(
            {
                "model": {"vocab_size": 64, "width": D, "layers": layers, "heads": 4, "kv_heads": 2, "ffn_width": 64},
                "batch": {"sequence_length": S, "global_batch": B, "micro_batch": B},
                "layout": {"tp": T, "sp": sp},
            }
        )
        engine, weights = build(job, join_world(job, torch.device("cpu")))
        [model] = engine.modules
        weights.start_micro_batch(last=True)
        tokens = torch.zeros(B, S, dtype=torch.int64)
        with Collectives() as seen_here:
            model(tokens, tokens, B * S).backward()
        seen.append(seen_here)
    count = {name: seen[1].count[name] - seen[0].count[name] for name in seen[1].count}
    size = {name: seen[1].bytes[name] - seen[0].bytes[name] for name in seen[1].bytes}
    return {k: v for k, v in count.items() if v}, {k: v for k, v in size.items() if v}


@pytest.mark.thorough
def test_two_all_reduces_a_layer_forward_and_two_backward_without_sequence_parallelism() -> None:
    for count, size in run_ranks(layer_traffic, T, False):
        assert count == {"all_reduce": 4}
        assert size == {"all_reduce": 4 * (4 * B * S * D)}  # an all-reduce moves 2(t−1)/t of it: 16·sbh·(t−1)/t in bf16


@pytest.mark.thorough
def test_sequence_parallelism_gathers_and_scatters_the_same_bytes_instead() -> None:
    for count, size in run_ranks(layer_traffic, T, True):
        norms = count.pop("all_reduce", 0)  # the norms' weights: their gradients are parts, summed over the ranks
        norm_bytes = size.pop("all_reduce", 0)
        assert count == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
        # each moves (t−1)/t of the whole: 8·(t−1)/t·2sbh = 16·sbh·(t−1)/t in bf16, as the four all-reduces
        assert size == dict.fromkeys(count, 4 * (4 * B * S * D))
        assert (norms, norm_bytes) == (2, 2 * 4 * D)


def order_traffic(first: str) -> dict[str, int]:
    """Collectives of a two-matrix feed-forward cut column-then-row or row-then-column."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    column = ColwiseParallel(input_layouts=Replicate())
    row = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if first == "column":
        plan = {"0": column, "2": RowwiseParallel(output_layouts=Replicate())}
    else:
        plan = {"0": row, "2": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    x = torch.randn(B, S, D, requires_grad=True)
    with Collectives() as seen:
        model(x).sum().backward()
    return dict(seen.count)


def test_row_then_column_costs_more_than_column_then_row() -> None:
    good, bad = run_ranks(order_traffic, T, "column")[0], run_ranks(order_traffic, T, "row")[0]
    assert sum(good.values()) == 2  # one all-reduce forward, one backward
    assert sum(bad.values()) > sum(good.values())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathers_run_ahead_of_use_by_the_prefetch_depth(depth: int) -> None:
    """The order of events tells: with depth k the gather of block i + k is asked for before block i computes."""
    order = run_ranks(gather_order, 2, depth)[0]
    for block in range(4 - depth):
        if depth:
            assert order.index(f"gather {block + depth}") < order.index(f"compute {block}")
        if block + depth + 1 < 4:
            assert order.index(f"gather {block + depth + 1}") > order.index(f"compute {block}")


def gather_order(depth: int) -> list[str]:
    """Forward events of a zero-3 model of four blocks: when each block's parameters are asked for, and its compute."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    job = Job.model_validate(
        {
            "model": {"vocab_size": 64, "width": D, "layers": 4, "heads": 4, "ffn_width": 64},
            "batch": {"sequence_length": S, "global_batch": 2, "micro_batch": 1},
            "layout": {"dp_shard": 2, "zero": 3, "prefetch": depth},
        }
    )
    engine, _ = build(job, join_world(job, torch.device("cpu")))
    [model] = engine.modules
    events: list[str] = []
    unshard = FSDPParamGroup.unshard

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_unsharded and self._all_gather_result is None and self._module_fqn.startswith("layers."):
            events.append(f"gather {self._module_fqn.split('.')[1]}")
        return unshard(self, *args, **kwargs)

    FSDPParamGroup.unshard = recorded
    for name, block in model.layers.items():
        block.attention.register_forward_pre_hook(lambda *_, name=name: events.append(f"compute {name}"))
    tokens = torch.zeros(1, S, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, tokens, S)
    return events
