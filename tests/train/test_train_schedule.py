"""The learning rate is a pure function of the step."""

import math

import pytest

from meshwright.job import Job
from meshwright.train import learning_rate


def job(name: str, **schedule: object) -> Job:
    return Job.model_validate(
        {"run": {"steps": 100}, "optimizer": {"lr": 2.0}, "schedule": {"name": name, "warmup_steps": 10, **schedule}}
    )


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_rises_linearly_to_the_peak(name: str) -> None:
    assert [learning_rate(job(name), step) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_cosine_falls_to_the_floor_through_the_middle() -> None:
    plan = job("cosine", min_lr_ratio=0.1)
    assert learning_rate(plan, 55) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(plan, 100) == pytest.approx(0.2)
    assert learning_rate(plan, 32) == pytest.approx(2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * 22 / 90))))


def test_wsd_stays_then_decays_linearly() -> None:
    plan = job("wsd", decay_steps=20, min_lr_ratio=0.0)
    assert [learning_rate(plan, step) for step in (11, 80, 90, 100)] == pytest.approx([2.0, 2.0, 1.0, 0.0])


def test_wsd_decays_over_a_tenth_when_not_told() -> None:
    plan = job("wsd", min_lr_ratio=0.5)
    assert [learning_rate(plan, step) for step in (90, 95, 100)] == pytest.approx([2.0, 1.5, 1.0])


def test_constant_stays() -> None:
    assert learning_rate(job("constant"), 100) == 2.0


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(job("constant", warmup_steps=0), 1) == 2.0
