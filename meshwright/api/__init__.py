"""What Python programs call, one file a function; the command line is built on the same functions. Imports no torch
until one of them needs it."""

from meshwright.api import ray
from meshwright.api.checkpoints import Checkpoint
from meshwright.api.jobs import load_job
from meshwright.api.measuring import bench
from meshwright.api.planning import Plan, PlannedLayout, plan
from meshwright.api.rehearsing import rehearse
from meshwright.api.runs import Run, open_run
from meshwright.api.training import train
from meshwright.api.verifying import Report, verify

__all__ = [
    "Checkpoint",
    "Plan",
    "PlannedLayout",
    "Report",
    "Run",
    "bench",
    "load_job",
    "open_run",
    "plan",
    "ray",
    "rehearse",
    "train",
    "verify",
]
