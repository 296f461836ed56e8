"""The learning rate as a pure function of the step."""

import math

from meshwright.job import Job


def learning_rate(job: Job, step: int) -> float:
    """The rate of optimizer step `step` (the first is 1): warm-up, then cosine, stable-decay or constant."""
    return job.optimizer.lr * _factor(job, step)


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
