"""Whether a check of asynchronous tensor parallelism shows anything: graphs without fused products are equal, too."""

from collections.abc import Mapping, Sequence

import torch

from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.layout import ranks_of
from meshwright.verify.compare import Comparison

PLAINLY = (
    "on CPU ranks, and on ranks that share a GPU, the rewritten graphs run with torch's plain fallback, first the "
    "message and then the product; the GPU's kernels, which send pieces beside products, are not run"
)
OPERATIONS = {"fused_all_gather_matmul": "gathers", "fused_matmul_reduce_scatter": "scatters"}
"""Torch's fused operations, and their messages."""
Calls = Sequence[Mapping[str, int]]
"""How often every rank ran each of them."""


def runs_plainly(layout: Layout, device: str) -> bool:
    """Whether a check of this layout leaves the GPU's kernels out."""
    return layout.async_tp and (device == "cpu" or torch.cuda.device_count() < ranks_of(layout))


def check_fused(job: Job, device: str, ranks: Calls) -> list[Comparison]:
    """Rows that fail if a rank gathered or scattered nothing within a product."""
    if not job.layout.async_tp or device != "cpu":
        return []
    none = "a rank ran none: the check says nothing about layout.async_tp = true"
    return [Comparison("fused", name, 0.0, None, none) for name, fewest in _fewest(ranks).items() if not fewest]


def fused_notes(job: Job, device: str, ranks: Calls) -> list[str]:
    """How many messages were part of a product."""
    if not job.layout.async_tp or device != "cpu":
        return []
    counted = " and ".join(f"{number} {OPERATIONS[name]}" for name, number in _fewest(ranks).items())
    return [f"layout.async_tp: every rank ran at least {counted} as part of a product"]


def _fewest(ranks: Calls) -> dict[str, int]:
    return {name: min(rank.get(name, 0) for rank in ranks) for name in OPERATIONS}
