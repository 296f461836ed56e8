"""Whether a check exercises a parameter at all: tensors of pure rounding errors prove nothing."""

from collections.abc import Collection
from dataclasses import replace

import torch

from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.model.encoder import is_unused
from meshwright.verify.compare import Comparison

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


def unexercised(job: Job, zeros: Collection[str]) -> list[str]:
    """Parameters whose gradient should not be zero but is."""
    expected = zero_by_mathematics(job, zeros)
    return sorted(name for name in zeros if name not in expected)


def without_signs_of_rounding(rows: list[Comparison], job: Job, zeros: Collection[str]) -> list[Comparison]:
    """The rows: updates that amplify nothing but rounding errors get no verdict.

    Of a parameter that should have a gradient, `vacuous` then says that it has none.
    """
    if job.optimizer.name not in SIGN_LIKE:
        return rows
    return [replace(row, bound=None) if row.kind == "update" and row.name in zeros else row for row in rows]
