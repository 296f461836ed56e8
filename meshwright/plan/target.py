"""Which machines a plan is for: as `--cluster` says, in nodes as they are built, with what a job knows of its own."""

import re

from meshwright.errors import UserError
from meshwright.hardware import completed
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import ranks_of, require_layout
from meshwright.plan.machine import MOST_GPUS_PER_NODE, parse_cluster, spelled

MOST_GPUS = 2**18
"""Of a search: the layouts of many more take minutes to bound."""
_COUNT = re.compile(r"(\d{1,9})x([a-z][\w-]*)")
_NODE = (
    (("gb200", "gb300"), 72),
    (("gh200", "a100-64gb", "h100-64gb"), 4),
    (("v100",), 16),
)
"""Most GPUs of a node: a GB200 rack has 72 behind one NVLink switch, a DGX-2 has 16 V100, superchips and the blades of
Leonardo and MareNostrum 5 have four; else eight, as every HGX board."""
_KEPT = ("mtbf_hours", "price", "storage_gb_s", "pue", "co2_g_per_kwh")
"""What a job's section says about where it runs, whichever machines are asked about."""
_OF_THE_GPU = ("links", "host_memory_gib", "gpu_watts")


def target_of(job: Job | None, spelling: str | Cluster | None) -> tuple[Cluster, str]:
    """The machines of a search, and a sentence on how `spelling` was understood where that needs one.

    Without one they are the job's own. With one, the job's section still says what it says of failures, price and
    storage, and if it is of the same GPU, of links and host memory.
    """
    cluster, note = _described(Cluster() if job is None else job.cluster, spelling)
    if (gpus := cluster.nodes * cluster.gpus_per_node) > MOST_GPUS:
        raise UserError(
            f"--cluster = {spelled(cluster)} has {gpus:,} GPUs, and a plan takes at most {MOST_GPUS:,}; give fewer"
        )
    return cluster, note


def _described(own: Cluster, spelling: str | Cluster | None) -> tuple[Cluster, str]:
    if isinstance(spelling, Cluster):
        return completed(spelling), ""
    if spelling is None:
        if (own.name or own.gpu) is None:
            raise UserError(
                "--cluster is missing, and a search needs it; write --cluster 8xh100 or 16x8xa100-80gb, or search for "
                "a job with a [cluster]"
            )
        return completed(own), ""
    cluster, note = in_nodes(spelling)
    names = _KEPT + (_OF_THE_GPU if own.gpu in (None, cluster.gpu) and own.name in (None, cluster.name) else ())
    kept = {name: getattr(own, name) for name in names if name in own.model_fields_set}
    return cluster.model_copy(update=kept), note


def check_target(job: Job, spelling: str | None) -> tuple[Cluster, str]:
    """The machines of one job's prediction: `--cluster`, else its own section, with as many as its layout fills."""
    if spelling is None:
        return completed(job.cluster, ranks_of(job.layout)), ""
    return target_of(job, spelling)


def why_refused(job: Job, ranks: int) -> str | None:
    """Why the trainer would not start a job on so many ranks; None if its layout is one that it runs."""
    try:
        require_layout(job, ranks)
    except UserError as error:
        return str(error)
    return None


def in_nodes(spelling: str) -> tuple[Cluster, str]:
    """`64xh100` is eight nodes of eight, since no node has 64; `1x64xh100` would be one."""
    count = _COUNT.fullmatch(spelling.lower())
    if count is None or (single := parse_cluster(f"1x{count[2]}")).name is not None:
        return parse_cluster(spelling), ""
    gpus, gpu = int(count[1]), single.gpu or ""
    most = next((size for names, size in _NODE if gpu.startswith(names)), 8)
    if gpus <= most:
        return parse_cluster(spelling), ""
    each = next(size for size in range(most, 0, -1) if gpus % size == 0)
    if each < min(most, 4):
        raise UserError(
            f"--cluster = {spelling} is more than a node has ({most}), and {gpus} are not equal nodes of 4 to {most}; "
            f"write the nodes too, as {gpus // most}x{most}x{gpu}, or 1x{gpus}x{gpu} for a single node"
        )
    split = parse_cluster(f"{gpus // each}x{each}x{gpu}")
    note = f"--cluster = {spelling} is taken as {spelled(split)}: {gpus // each} nodes of {each}"
    if gpus <= MOST_GPUS_PER_NODE:
        note += f"; write 1x{gpus}x{gpu} for a single node of {gpus}"
    return split, note
