"""Fixes for the compiler of torch before 2.13; on later releases they do nothing. Heavy to import.

Attention in float64 on the CPU: the compiler assumes the kernel's log-sum-exp is float32, and the compiled backward
would refuse its own forward's result. Only verification computes in float64.

Full recomputation of blocks with our own autograd functions: tags on operations say what to recompute. Torch
2.11 gives none to those inside an autograd function, and keeps their results: with SwiGLU's the inner width, with fp8's
products everything. Here they get the tags of what surrounds them, before forward and backward are split.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.model.numbers import wide_dtype
from meshwright.torch_private.attention import cpu_flash
from meshwright.torch_private.compiler import set_shapes
from meshwright.torch_private.graph_passes import CustomGraphPass, set_joint_pass


def correct_attention_shapes() -> None:
    """Tell the compiler the true format of what attention returns."""
    if torch.__version__ < "2.13":  # a comparison of versions, not of text
        set_shapes(cpu_flash.default, _results)


def _results(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    return torch.empty_like(query), query.new_empty(batch, queries, heads, dtype=wide_dtype(query.dtype)).transpose(
        1, 2
    )


def recompute_inside_functions() -> None:
    """Let the compiler recompute the results of autograd functions inside recomputed blocks."""
    if torch.__version__ < "2.13":  # a comparison of versions, not of text
        set_joint_pass(TagFunctions())


class TagFunctions(CustomGraphPass):
    """Gives untagged operations of a fully recomputed forward the tags of the rest."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        tags = [node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta]
        if not tags or CheckpointPolicy.MUST_SAVE in tags:
            return  # operations kept by name are kept in functions too
        example = next(node.meta for node in graph.nodes if "recompute" in node.meta)
        backward: set[Any] = set()
        for node in graph.nodes:
            gradient = node.op == "placeholder" and node.name.startswith("tangents")
            if gradient or any(one in backward for one in node.all_input_nodes):
                backward.add(node)
            elif node.op == "call_function" and "recompute" not in node.meta:
                node.meta |= {name: example[name] for name in ("recompute", "ac_graph_id")}

    def uuid(self) -> bytes:
        """The pass's version, by which compiled code is cached."""
        return b"meshwright recompute_inside_functions 1"
