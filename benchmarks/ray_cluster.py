"""A real Ray cluster on this machine, on the loopback alone, and a small job for it: a head without CPUs, and raylets
that come and go."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Not 127.0.0.1, which Ray replaces by the machine's public address when a program connects.
IP = "127.0.0.2"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "OMP_NUM_THREADS": "1"}
# Else its workers, and the ranks they start, run with niceness 15 and wait for all else on a busy machine.
QUIET["RAY_worker_niceness"] = "0"
_NODE = {"node_ip_address": IP, "include_dashboard": False, "object_store_memory": 80 << 20}


JOB = """
[model]
preset = "tiny-llama"
layers = 1
width = 32
heads = 2
kv_heads = 2
ffn_width = 32
[data]
sources = ["builtin:synthetic"]
workers = 0
[batch]
sequence_length = 16
global_batch = 4
micro_batch = 2
[layout]
dp_shard = 2
tp = 2
[schedule]
name = "constant"
warmup_steps = 0
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 3
keep_last = 1000000
[run]
device = "cpu"
folder = "run"
steps = 1000000
"""
"""A run that never ends by itself: it is stopped once enough was seen, however fast
the machine is, and nothing in it depends on run.steps."""


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    with suppress(OSError):
        children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
        return [one for child in map(int, children) for one in (child, *descendants(child))]
    return []


class RayCluster:
    """Raylets with CPUs of their own."""

    def __init__(self, cpus: Sequence[int]) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_NODE})
        self.address: str = self._cluster.address
        self.nodes = [self.add(count) for count in cpus]
        self._cluster.wait_for_nodes()

    def add(self, cpus: int) -> Any:
        """Start another raylet."""
        return self._cluster.add_node(num_cpus=cpus, wait=False, **_NODE)

    def kill(self, node: Any) -> None:
        """Kill a raylet at once, as the loss of its machine would."""
        self._cluster.remove_node(node, allow_graceful=False)

    def signal(self, node: Any, number: int) -> None:
        """Send a signal to a raylet and to all that runs on it, as nothing of a machine survives it."""
        raylet = node.all_processes["raylet"][0].process.pid
        for pid in (raylet, *descendants(raylet)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End all of it."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def ray_cluster(cpus: Sequence[int]) -> Iterator[RayCluster]:
    """A cluster whose raylets have so many CPUs each."""
    os.environ.update(QUIET)
    cluster = RayCluster(cpus)
    try:
        yield cluster
    finally:
        cluster.end()
