"""Plans of models that predict further tokens; what they hold is compared with real ranks in tests/rehearse."""

from typing import Any

import pytest
from plan_jobs import asked, llama, nodes

from meshwright.cost import flops_per_token
from meshwright.errors import UserError
from meshwright.layout import require_layout
from meshwright.plan import parse_cluster, predict, search


def test_a_step_grows_by_the_work_of_the_extra_blocks_and_heads() -> None:
    batch = {"sequence_length": 4096, "global_batch": 8, "micro_batch": 8}
    jobs = [
        llama("llama-3.2-1b", model={"extra_tokens": count}, batch=batch, run={"compile": True}) for count in range(3)
    ]
    found = [predict(job, parse_cluster("1xh200")) for job in jobs]
    work = [flops_per_token(job.model, 4096, "causal") for job in jobs]
    for few, many in ((0, 1), (1, 2)):
        grown = found[many].step_s / found[few].step_s
        assert grown == pytest.approx(work[many] / work[few], rel=0.03)
        assert found[many].fullest.device > found[few].fullest.device
    assert any("model.extra_tokens = 1" in guess for guess in found[1].guessed)


def test_the_last_stage_of_a_pipeline_has_them() -> None:
    batch = {"sequence_length": 4096, "global_batch": 32, "micro_batch": 1}
    layout = {"pp": 4, "dp_shard": 2, "zero": 1, "split": [8, 8, 8, 8]}
    plain, extra = (
        predict(llama(model={"extra_tokens": count, "tied": False}, batch=batch, layout=layout), nodes(1)).memory
        for count in (0, 1)
    )
    assert [one.device for one in extra[:3]] == pytest.approx([one.device for one in plain[:3]])
    table = 128256 * 4096
    assert extra[3].terms["working weights"] - plain[3].terms["working weights"] > 2 * table  # the embedding too


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("preset", "model", "batch", "count_nodes"),
    [("llama-3-8b", {"layers": 8, "vocab_size": 32000}, 64, 2), ("llama-3-70b", {}, 512, 8)],
    ids=["small", "too large for some layouts"],
)
def test_every_layout_that_a_search_finds_can_be_run(
    count: int, preset: str, model: dict[str, Any], batch: int, count_nodes: int
) -> None:
    job = asked(preset, 4096, batch, model={**model, "extra_tokens": count})
    found = search(job, nodes(count_nodes, "a100-80gb"), top=20, allow=["zero-bubble"])
    assert found.best
    for candidate in found.best:
        require_layout(candidate.job, 8 * count_nodes)


def test_a_budget_that_does_not_count_them_is_refused() -> None:
    batch = {"sequence_length": 2048, "global_batch": 8, "micro_batch": 1}
    job = llama("llama-3.2-1b", model={"extra_tokens": 1}, batch=batch, memory={"recompute": {"budget_gib": 4}})
    with pytest.raises(UserError, match=r"does not count what blocks of model\.extra_tokens = 1 keep; set"):
        predict(job, parse_cluster("1xh200"))
