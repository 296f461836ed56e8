"""Runs wherever they were submitted to: their state, and how to cancel them. Needs no torch."""

from pathlib import Path

from meshwright.launch import ray, slurm
from meshwright.launch.slurm import Status


def status_of(run: Path) -> Status:
    """The state of the run in a folder."""
    return ray.status_of(run) if _on_ray(run) else slurm.status_of(run)


def statuses(parent: Path) -> list[Status]:
    """The state of every run in a folder, newest first."""
    return slurm.statuses(parent, status_of)


def cancel(run: Path, wait_s: float) -> Status:
    """Let a run save its state, and start no further job or attempt of it."""
    return ray.cancel(run, wait_s) if _on_ray(run) else slurm.cancel(run, wait_s)


def _on_ray(run: Path) -> bool:
    return ray.Submission.read(run) is not None
