"""A layout's distinct calls on the GPU of this machine, in a process of their own."""

import torch
import torch.distributed as dist

from meshwright.verify.collectives import Calls, Outcome, replay
from meshwright.verify.ranks import RankError, run_ranks

BACKEND = "cpu:gloo,cuda:nccl"
"""As jobs create their groups."""


def replay_on_gpu(calls: Calls) -> Outcome | None:
    """What NCCL accepts of these calls, issued by one rank; None if this machine has no CUDA device.

    In a forked process: one that has used a GPU could not fork the ranks of another check.
    """
    if not has_gpu():
        return None
    try:
        outcome: Outcome = run_ranks(_replay, 1, calls)[0]
    except RankError as error:
        return Outcome("NCCL", refused=[f"the replay itself: {str(error).strip().splitlines()[-1]}"])
    return outcome


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    return torch.cuda.device_count() > 0


def _replay(calls: Calls) -> Outcome:
    dist.destroy_process_group()  # that of all ranks, which is on the CPU
    return replay(calls, BACKEND)
