"""An asynchronous pipeline equals one process of the same staleness, and the known ways to get it wrong are seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from verify_jobs import llama_job, matrix_jobs

from meshwright.job import Job, load_job
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import PipeDream
from meshwright.parallel.pipelining.pipedream import Version, VersionedWeights
from meshwright.train import asynchronous
from meshwright.verify import Verdict, check, compare, shrink
from meshwright.verify.check import reference

Patch = pytest.MonkeyPatch


def stale_job(pp: int = 2, *, steps: int = 5, every: int = 3, clip: float = 2.0, **model: Any) -> Job:
    """Steps in windows of `every`, so that the pipeline fills, empties and fills again."""
    base = llama_job(steps=steps, batch={"micro_batch": 4}, pp=pp, schedule="pipedream").model_dump()
    base["model"] |= model
    base["evaluation"]["every_steps"], base["optimizer"]["clip"] = every, clip
    return Job.model_validate(base)


def synchronous(job: Job) -> Job:
    return job.model_copy(update={"layout": job.layout.model_copy(update={"schedule": "1f1b"})})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "job",
    [stale_job(2), stale_job(4, steps=9, every=6, layers=5), stale_job(3, steps=6, every=5, clip=1.0, dropout=0.1)],
    ids=["pp2-layers3", "pp4-layers5", "pp3-dropout"],
)
def test_a_pipeline_equals_one_process_of_the_same_staleness(job: Job) -> None:
    verdict = check(job)
    assert verdict.ok, verdict.first_wrong
    counted = {kind: sum(row.kind == kind for row in verdict.rows) for kind in ("loss", "norm", "evaluation")}
    assert counted == {"loss": job.run.steps, "norm": job.run.steps, "evaluation": 3}


def test_staleness_begins_with_the_second_step_and_is_gone_in_windows_of_one() -> None:
    job = stale_job(every=0, clip=0.0)
    stale, fresh = reference(job, "float64").losses, reference(synchronous(job), "float64").losses
    assert stale[0] == fresh[0] and all(a != b for a, b in zip(stale[1:], fresh[1:], strict=True))
    one_by_one = stale_job(every=1, clip=0.0)
    rows = compare([reference(one_by_one, "float64")], reference(synchronous(one_by_one), "float64"), "float64")
    assert all(row.ok for row in rows)


def test_a_stage_is_clipped_by_its_own_norm() -> None:
    """In one step only what is clipped differs: at 2.0 the first stage is, and the last is not."""
    free, clipped = (reference(stale_job(steps=1, clip=clip), "float64").updates for clip in (0.0, 2.0))
    changed = {n for n, shard in free.items() if not torch.equal(shard.values, clipped[n].values)}
    last = {n for n in free if n.startswith(("layers.2.", "final_norm.", "head."))}
    assert changed == set(free) - last


def broken(job: Job, breaking: Callable[[], None]) -> Verdict:
    reference(job, "float64")
    breaking()
    verdict = check(job)
    assert verdict.ok is False
    return verdict


def right(verdict: Verdict) -> set[str]:
    """What is equal all the same."""
    return {f"{row.kind} of {row.name}" for row in verdict.rows if row.ok}


def test_a_backward_with_the_newest_weights(monkeypatch: Patch) -> None:
    """No stashing: every update overwrites the weights that mini-batches in flight still need."""
    make = VersionedWeights.refresh

    def overwrite(self: VersionedWeights) -> None:
        if self._newest is None:
            make(self)
        for name, master in self.masters.items():
            self.newest.tensors[name].data.copy_(master.data)

    verdict = broken(stale_job(), lambda: monkeypatch.setattr(VersionedWeights, "refresh", overwrite))
    # The first backward comes before the first update, and forwards do use the newest weights: a silent bug.
    assert {"gradient of embed.weight", "loss of step 1", "loss of step 2", "norm of step 1"} <= right(verdict)
    assert "norm of step 2" not in right(verdict)


def test_a_forward_with_a_version_too_old(monkeypatch: Patch) -> None:
    make = VersionedWeights.refresh
    waiting: dict[VersionedWeights, Version] = {}

    def one_late(self: VersionedWeights) -> None:
        make(self)
        made = self.newest
        if self.masters["layers.2.ffn_norm.weight" if dist.get_rank() else "embed.weight"].grad is not None:
            self._newest = waiting[self]  # an update, not the first weights
        waiting[self] = made

    verdict = broken(stale_job(), lambda: monkeypatch.setattr(VersionedWeights, "refresh", one_late))
    assert {"loss of step 1", "norm of step 1"} <= right(verdict) and "loss of step 2" not in right(verdict)


def test_clipping_by_more_than_the_stage_s_own_norm(monkeypatch: Patch) -> None:
    backward = PipeDream.backward

    def by_all_after(self: PipeDream, *given: Any) -> Any:
        result = backward(self, *given)
        return replace(result, own_squares=result.squares)

    verdict = broken(stale_job(), lambda: monkeypatch.setattr(PipeDream, "backward", by_all_after))
    assert {"loss of step 1", "norm of step 1", "gradient of embed.weight"} <= right(verdict)
    assert "update of embed.weight" not in right(verdict) and "loss of step 3" not in right(verdict)


def test_the_rate_of_another_step(monkeypatch: Patch) -> None:
    """A stage that counted its own updates across windows wrongly would take a neighbour's rate."""
    rate = asynchronous.learning_rate
    early = lambda job, step: rate(job, max(1, step - 1))  # noqa: E731
    verdict = broken(stale_job(), lambda: monkeypatch.setattr(asynchronous, "learning_rate", early))
    assert {row.kind for row in verdict.rows if row.ok is False} >= {"update", "loss"}


@pytest.mark.parametrize(("pp", "layers"), [(2, 4), (3, 7), (8, 16)])
def test_a_shrunk_job_stays_one_that_can_be_stale(pp: int, layers: int) -> None:
    overrides = [f"layout.pp={pp}", "layout.schedule=pipedream", "batch.micro_batch=16", f"model.layers={layers}"]
    small, changes = shrink(load_job("demo", overrides).job)
    require_layout(small, ranks_of(small.layout))
    assert small.layout.schedule == "pipedream" and small.layout.pp > 1 and small.accumulation == 1
    assert small.run.steps > small.evaluation.every_steps > small.layout.pp
    assert any(change.text.startswith("reference: one process with the same staleness") for change in changes)


def test_the_load_of_experts_is_counted_by_all_stages() -> None:
    job = matrix_jobs()["moe, untied · pp 2, pipedream"]
    verdict = check(job)
    metrics = {row.name.partition(",")[0] for row in verdict.rows if row.kind == "metric" and row.ok}
    assert verdict.equal and metrics >= {"expert_entropy", "expert_imbalance", "idle_experts"}
