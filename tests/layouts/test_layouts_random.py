"""A fixed sample of drawn jobs: every answer is equal, or a refusal. `make nightly` draws 500 others."""

import pytest

from meshwright.verify import Answer, draw, run_draws

SEED = 757
DRAWS = [draw(SEED, number) for number in range(1, 15)]


@pytest.fixture(scope="module")
def answers() -> dict[int, Answer]:
    """All of them, run together as far as there are cores."""
    return {answer.draw.number: answer for answer in run_draws(DRAWS)}


@pytest.mark.thorough
@pytest.mark.parametrize("number", [drawn.number for drawn in DRAWS])
def test_a_drawn_job_is_equal_or_refused(number: int, answers: dict[int, Answer]) -> None:
    answer = answers[number]
    assert answer.outcome in ("equal", "refused"), (answer.draw.name, answer.sentence, answer.verdict)


def test_the_sample_is_worth_its_time() -> None:
    jobs = [drawn.job for drawn in DRAWS if drawn.refusal is None]
    assert 10 <= len(jobs) < len(DRAWS) and not any(job.run.compiles for job in jobs)
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        assert any(getattr(job.layout, axis) > 1 for job in jobs), axis
    assert {job.data.mask_documents for job in jobs} == {True, False}
    assert {job.data.format for job in jobs} == {"text", "conversations", "preferences"}
    assert any(job.prefers and job.preference.needs_reference for job in jobs)
    adapters = [job.model.adapter for job in jobs if job.model.adapter is not None]
    assert {adapter.base for adapter in adapters} == {"compute", "nf4", "int8"}
    assert any(adapter.dora for adapter in adapters)
    assert any(job.data.workers for job in jobs)
