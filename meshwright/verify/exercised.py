"""Whether a check exercises a parameter at all: tensors of pure rounding errors prove nothing."""

from collections.abc import Collection
from dataclasses import replace

import torch

from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.model.encoder import is_unused
from meshwright.verify.compare import Comparison
from meshwright.verify.observe import Observation

SIGN_LIKE = ("lion", "muon")
"""Optimizers whose update is as large for pure rounding errors as for any other gradient."""


def zero_by_mathematics(job: Job, zeros: Collection[str]) -> set[str]:
    """Of the parameters whose gradient is zero, those that must be: key biases without rotary positions, and what an
    encoder does not use.

    Attention is invariant to what is added to all keys. A user's model may have such biases too.
    """
    if job.model.file is None:
        where = "vision." if job.model.positions == "rope" else ""  # sound has no such biases
        keys = {name for name in zeros if name.startswith(where) and name.endswith(".attention.k.bias")}
        return keys | {name for name in zeros if is_unused(job.model, name)}
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    biases = [name for name in zeros if name.endswith(".bias")]
    return {name for name in biases if architecture.role(name.removesuffix(".bias")) == "kv-column"}


def check_exercised(rows: list[Comparison], job: Job, zeros: Collection[str]) -> list[Comparison]:
    """The rows: those that compare only rounding errors fail, and those that amplify them get no verdict."""
    expected = zero_by_mathematics(job, zeros)
    compared = []
    for row in rows:
        if row.kind == "gradient" and row.name in zeros and row.name not in expected:
            row = replace(row, note="only rounding errors arrive here: the check says nothing about this parameter")
        elif row.kind == "update" and row.name in expected and job.optimizer.name in SIGN_LIKE:
            row = replace(row, bound=None)
        compared.append(row)
    return compared


def check_dropping(job: Job, alone: Observation) -> list[Comparison]:
    """A row that fails if experts have a capacity and one process dropped nothing: dropping would not be checked."""
    experts = job.model.experts
    if experts is None or experts.capacity is None or any(alone.metrics["expert_dropped"]):
        return []
    note = f"no token was dropped: the check says nothing about model.experts.capacity = {experts.capacity:g}; lower it"
    return [Comparison("metric", "expert_dropped", 0.0, None, note)]
