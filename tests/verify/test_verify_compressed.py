"""Compressed layouts equal one process that compresses the same way, and mistakes in the arithmetic are seen."""

from typing import Any

import pytest
from torch import Tensor
from verify_jobs import llama_job

from meshwright.job import Job
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel.compression.replicas import Replicas
from meshwright.parallel.compression.weights import Reduction
from meshwright.verify import check, shrink
from meshwright.verify.check import reference

LOSSY: dict[str, dict[str, Any]] = {
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8", "bucket_mb": 0.02},
    "topk": {"compress": "topk", "compress_ratio": 0.05, "bucket_mb": 0.02},
    "powersgd": {"compress": "powersgd", "compress_rank": 2, "bucket_mb": 0.02},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSY)
def test_replicas_equal_one_process_that_compresses_as_they_do(name: str) -> None:
    job = llama_job(steps=3, dp_replicate=2, **LOSSY[name])
    verdict = check(job)
    assert verdict.ok, verdict.first_wrong
    plain = job.model_copy(update={"layout": job.layout.model_copy(update={"compress": "none"})})
    lossy_losses, losses = reference(job, "float64").losses, reference(plain, "float64").losses
    assert lossy_losses[0] == pytest.approx(losses[0], rel=1e-12)
    assert lossy_losses[1] != pytest.approx(losses[1], rel=1e-9)


@pytest.mark.thorough
def test_the_exchange_with_nothing_left_out_equals_plain_training_under_shards_and_a_pipeline() -> None:
    for layout in ({"dp_shard": 2}, {"pp": 2}):
        verdict = check(llama_job(dp_replicate=2, compress="topk", compress_ratio=1.0, bucket_mb=0.02, **layout))
        assert verdict.ok, verdict.first_wrong


def forgetting(self: Any, masters: Any, run: Any = Reduction.reduce) -> None:
    run(self, masters)
    self.forget()


def in_the_wrong_order(self: Any, payload: Tensor, run: Any = Replicas.exchange) -> Any:
    arriving, work = run(self, payload)
    work.wait()
    return arriving.view(self.size, -1).flip(0).view_as(arriving), work


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "where", "what", "instead"),
    [
        ("topk", Reduction, "reduce", forgetting),
        ("int8", Reduction, "reduce", forgetting),
        ("int8", Replicas, "exchange", in_the_wrong_order),
    ],
)
def test_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, where: Any, what: str, instead: Any) -> None:
    job = llama_job(steps=2, dp_replicate=2, **LOSSY[name])
    reference(job, "float64")
    monkeypatch.setattr(where, what, instead)
    assert check(job).ok is False


def big(**layout: Any) -> Job:
    return Job.model_validate({"model": {"preset": "llama-3.2-1b"}, "batch": {"global_batch": 64}, "layout": layout})


@pytest.mark.parametrize(
    ("layout", "compress", "note"),
    [
        ({"dp_replicate": 8}, "int8", "reference: one process that compresses as the replicas do"),
        ({"dp_replicate": 4, "dp_shard": 4}, "topk", '"int8" → "topk" with compress_ratio 1.0, which'),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2, "cp": 4}, "none", '"int8" → "none", as no replicas'),
    ],
)
def test_a_lossy_job_is_checked_as_far_as_it_can_be(layout: dict[str, int], compress: str, note: str) -> None:
    small, changes = shrink(big(compress="int8", **layout))
    assert small.layout.compress == compress and any(note in change.text for change in changes)
    require_layout(small, ranks_of(small.layout))
