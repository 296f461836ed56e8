"""Key-value heads where there are fewer than ranks to share them: some ranks get copies."""

from math import lcm

from meshwright.job import Job


def kv_heads_of(job: Job) -> int:
    """Key-value heads that one rank projects: as many as queries where tp does not divide them and copies them."""
    model, tp = job.model, job.layout.tp
    return model.kv_heads // tp if model.kv_heads % tp == 0 else model.heads // tp


def kv_copies(job: Job) -> int:
    """How often Ulysses repeats each of a rank's key-value heads: until there are as many for every rank of cp."""
    layout, held = job.layout, kv_heads_of(job)
    return lcm(held, layout.cp) // held if layout.cp_method == "ulysses" else 1
