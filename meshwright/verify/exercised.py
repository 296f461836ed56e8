"""Whether a check exercises a parameter at all: two tensors of rounding are equal to anything."""

from collections.abc import Collection
from dataclasses import replace

import torch

from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.verify.compare import Comparison

SIGN_LIKE = ("lion", "muon")
"""Optimizers whose update is as large for a gradient of rounding as for any other."""


def zero_by_mathematics(job: Job, zeros: Collection[str]) -> set[str]:
    """Of the parameters whose gradient is zero, those that must be: biases of keys, where positions do not turn them.

    Attention does not see what is added to all keys alike. A user's model may have such biases too.
    """
    if job.model.file is None:
        turned = job.model.positions == "rope"
        return set() if turned else {name for name in zeros if name.endswith(".attention.k.bias")}
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    biases = [name for name in zeros if name.endswith(".bias")]
    return {name for name in biases if architecture.role(name.removesuffix(".bias")) == "kv-column"}


def check_exercised(rows: list[Comparison], job: Job, zeros: Collection[str]) -> list[Comparison]:
    """The rows, with those failed that compare nothing but rounding, and those left unjudged that amplify it."""
    expected = zero_by_mathematics(job, zeros)
    compared = []
    for row in rows:
        if row.kind == "gradient" and row.name in zeros and row.name not in expected:
            row = replace(row, note="only rounding errors arrive here: the check says nothing about this parameter")
        elif row.kind == "update" and row.name in expected and job.optimizer.name in SIGN_LIKE:
            row = replace(row, bound=None)
        compared.append(row)
    return compared
