"""Our own passes over the compiler's graphs. Heavy to import. torch 2.11 to 2.15."""

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "get_hash_for_files"]


def set_joint_pass(each: CustomGraphPass) -> None:
    """Run a pass on every graph of forward and backward before they are split."""
    config.joint_custom_pre_pass = each


def set_last_pass(each: CustomGraphPass | None) -> None:
    """Run a pass on every graph, a forward's and a backward's, after torch's own; None for no such pass."""
    config.post_grad_custom_post_pass = each
