"""Our own passes over the compiler's graphs. Heavy to import. torch 2.11 to 2.15."""

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]


def set_joint_pass(each: CustomGraphPass) -> None:
    """Run a pass on every graph of forward and backward before they are split."""
    config.joint_custom_pre_pass = each
