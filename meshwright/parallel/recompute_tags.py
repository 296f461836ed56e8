"""Full recomputation of compiled blocks that hold autograd functions of our own, on torch before 2.13.

The compiler is told by tags on operations what to make again. Torch 2.11 gives none to those inside an autograd
function, and keeps their results: with SwiGLU's the inner width, with fp8's products everything. Here they get the tags
of what surrounds them, before forward and backward are parted.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.torch_private.graph_passes import CustomGraphPass, set_joint_pass


def recompute_inside_functions() -> None:
    """Let the compiler make again what autograd functions inside of recomputed blocks made."""
    if torch.__version__ < "2.13":  # a comparison of versions, not of text
        set_joint_pass(TagFunctions())


class TagFunctions(CustomGraphPass):
    """Gives what is untagged in a forward that is made again as a whole the tags of the rest."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        tags = [node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta]
        if not tags or CheckpointPolicy.MUST_SAVE in tags:
            return  # what is kept by name is kept in functions too
        example = next(node.meta for node in graph.nodes if "recompute" in node.meta)
        backward: set[Any] = set()
        for node in graph.nodes:
            gradient = node.op == "placeholder" and node.name.startswith("tangents")
            if gradient or any(one in backward for one in node.all_input_nodes):
                backward.add(node)
            elif node.op == "call_function" and "recompute" not in node.meta:
                node.meta |= {name: example[name] for name in ("recompute", "ac_graph_id")}

    def uuid(self) -> bytes:
        """The pass's version, by which compiled code is kept."""
        return b"meshwright recompute_inside_functions 1"
