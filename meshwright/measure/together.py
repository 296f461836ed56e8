"""Ranks of one CPU that measure the same thing at the same time.

They share its cores, caches and memory. What one reaches while another draws random numbers is not what it reaches in a
step, where all compute the same; and a step waits for the slowest of them.
"""

import math

import torch
import torch.distributed as dist


class OtherRankFailed(Exception):
    """A measurement that works here and failed on another rank."""


class Together:
    """Where ranks meet during a measurement; a single process meets nobody."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        """How many."""

    def most(self, value: float = 0.0) -> float:
        """The largest of all ranks' values. All ranks wait for each other here."""
        if self.ranks == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if math.isinf(found.item()):
            raise OtherRankFailed
        return found.item()

    def fail(self) -> None:
        """Tell the others, wherever they meet next, that this rank gave the measurement up."""
        if self.ranks > 1:
            dist.all_reduce(torch.tensor(math.inf, dtype=torch.float64), dist.ReduceOp.MAX)
