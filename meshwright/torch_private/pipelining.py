"""Torch's pipeline runtime below its ready-made schedules. torch 2.11 to 2.15."""

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc as gradient_node
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _add_reduce_grad as add_reduce_grad
from torch.distributed.pipelining.schedules import _add_unshard_reshard as add_unshard_reshard
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineRuntime

__all__ = [
    "WAITS_FOR_SENDS",
    "Action",
    "ComputationType",
    "PipelineRuntime",
    "add_reduce_grad",
    "add_unshard_reshard",
    "gradient_node",
    "with_send_waits",
]

WAITS_FOR_SENDS = hasattr(schedules, "_add_wait_send")
"""Whether every send is waited for when what it sent is no longer needed, and not at the end of the step."""


def with_send_waits(orders: dict[int, list[Action]]) -> dict[int, list[Action]]:
    """Every rank's actions with a wait for each send, which torch 2.15 requires; earlier releases wait at the end of
    the step."""
    add = getattr(schedules, "_add_wait_send", None)
    return add(orders) if add else orders
