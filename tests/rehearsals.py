"""Rehearsals as a pipeline of 64 ranks gives them, for the tests of what is written and shown."""

from dataclasses import replace
from pathlib import Path

from meshwright.job import load_job
from meshwright.rehearse import Messages, RankMemoryUse, Rehearsal, RehearsedRank, RehearsedStep
from meshwright.rehearse.folder import save_rehearsal

GIB = 2**30


def rank(number: int, pipeline_rank: int, logits_gib: float = 0.0) -> RehearsedRank:
    """One kind of rank of a pipeline of four."""
    kinds = {"weights": 15.0, "gradients": 10.0, "optimizer states": 20.0, "activations": 26.5 + logits_gib}
    terms = {"weights": 10.0, "working weights": 5.0, "gradients": 10.0, "optimizer states": 20.0, "activations": 26.0}
    terms |= {"logits and loss": logits_gib, "workspaces": 0.0625}
    messages = (
        Messages("all_gather", "dp_shard", (number, number + 1), 234_881_024, 40),
        Messages("send", "pp", (number, number + 16), 33_554_432, 8),
    )
    memory = RankMemoryUse(
        allocated_bytes=int(sum(kinds.values()) * GIB),
        reserved_bytes=int((sum(kinds.values()) + 2.5) * GIB),
        device_bytes=int((sum(kinds.values()) + 4) * GIB),
        by_kind={kind: int(held * GIB) for kind, held in kinds.items()},
        planned_bytes=sum(terms.values()) * GIB,
        planned_reserved_bytes=(sum(terms.values()) + 2) * GIB,
        planned_terms={term: planned * GIB for term, planned in terms.items()},
    )
    return RehearsedRank(
        rank=number,
        pipeline_rank=pipeline_rank,
        stages=(pipeline_rank,),
        alike=16,
        state="measured",
        steps=10,
        step_s=2.875,
        phases_s={"data": 0.001, "forward": 0.95, "loss": 0.02, "backward": 1.8, "optimizer": 0.1, "other": 0.004},
        actions_s={f"F{pipeline_rank}": 0.119, f"B{pipeline_rank}": 0.225},
        kernels=None,
        memory=memory,
        needed_bytes=None,
        messages=messages,
        checkpoint_bytes=9 * GIB,
        checkpoint_s=4.5,
        place=("first stage", "stage 1", "stage 2", "last stage")[pipeline_rank],
    )


STEP = RehearsedStep(
    step_s=3.75,
    measured_s=2.875,
    modelled_s=0.875,
    phases_s={"forward": 0.95, "backward": 1.8, "optimizer": 0.125, "pipeline bubble": 0.6, "transfers": 0.275},
    modelled=("pipeline bubble", "transfers"),
    planned_s=3.6,
    tokens_per_s=279_620.0,
)
WHOLE = Rehearsal(
    world=64,
    cluster="8x8xh100",
    device="NVIDIA H200",
    torch="2.11.0",
    ranks=(rank(0, 0), rank(16, 1), rank(32, 2), rank(48, 3, logits_gib=4.0)),
    step=STEP,
    warnings=("rank 48 (last stage) holds 4.0 GiB more than the others",),
    limits=("losses: the other ranks' messages are replaced, so numbers mean nothing",),
)
"""Every stage, and the step that they make."""
ALONE = replace(WHOLE, ranks=(rank(16, 1),), step=None, warnings=())
"""One rank of the same world."""
SHORT = replace(
    WHOLE,
    ranks=(*WHOLE.ranks[:3], replace(WHOLE.ranks[3], state="out of memory", memory=None, needed_bytes=int(84.1 * GIB))),
    step=None,
)
"""The last stage does not fit."""


def saved(path: Path, rehearsal: Rehearsal = WHOLE) -> Path:
    """A rehearsal's folder."""
    return save_rehearsal(path, load_job("demo", ["layout.pp=4"]), rehearsal, ["meshwright", "rehearse", "demo"]).path
