"""The learning rate as a pure function of the step."""

import math

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.registries import SCHEDULES


def learning_rate(job: Job, step: int) -> float:
    """The rate of optimizer step `step` (the first is 1): warm-up, then cosine, stable-decay or constant; or as a
    schedule of the user's own says."""
    factor = _factor if job.schedule.name in SCHEDULES.built_in else _own_factor
    return job.optimizer.lr * factor(job, step)


def _own_factor(job: Job, step: int) -> float:
    factor = float(SCHEDULES.find(job.schedule.name)(job, step))
    if not (math.isfinite(factor) and factor >= 0):
        raise UserError(
            f'schedule.name = "{job.schedule.name}" gives {factor} for step {step}, and the learning rate is '
            "optimizer.lr times that; return a finite number from 0 on"
        )
    return factor


def _factor(job: Job, step: int) -> float:
    warmup, steps, floor = job.warmup_steps, job.run.steps, job.schedule.min_lr_ratio
    if step <= warmup:
        return step / warmup
    if job.schedule.name == "constant":
        return 1.0
    if job.schedule.name == "cosine":
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_start = steps - job.decay_steps
    if step <= decay_start:
        return 1.0
    return 1.0 - (1.0 - floor) * min(1.0, (step - decay_start) / job.decay_steps)
