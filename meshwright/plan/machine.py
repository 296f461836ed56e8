"""The machines of a plan: GPU, nodes and links, from a cluster section or a short form; lists what was guessed."""

import re
from dataclasses import dataclass
from math import gcd

from meshwright.errors import UserError
from meshwright.hardware import (
    Gpu,
    Profile,
    completed,
    find_profile,
    gpu_by_key,
    is_known,
    profile_of,
    require_given_profile_of,
    site_names,
)
from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import AUTO, ranks_of
from meshwright.plan.communication import Wires
from meshwright.plan.kernels import UNKNOWN_BANDWIDTH
from meshwright.plan.measured import Measured, measured_of
from meshwright.plan.rates import Rates, measured_rates, rates_of

_SPELLING = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([a-z][\w-]*)")
_SITE = re.compile(r"(?:(\d{1,9})x)?(.+)")
_MOST_NODES = 10**6
MOST_GPUS_PER_NODE = 10**4

# Network of a node, GB/s in one direction for each GPU, as the makers' reference designs and the named sites have it.
_USUAL_NETWORK = {
    "v100": (6.25, "a DGX-1V's four 100 Gb/s cards for eight GPUs"),
    "a100-64gb": (12.5, "Leonardo's 400 Gb/s for four GPUs"),
    "a100": (25.0, "a DGX A100's eight 200 Gb/s cards"),
    "h100-64gb": (25.0, "MareNostrum 5's four 200 Gb/s cards"),
    "h100": (50.0, "a DGX H100's eight 400 Gb/s cards"),
    "h200": (50.0, "a DGX H200's eight 400 Gb/s cards"),
    "gh200": (25.0, "one 200 Gb/s card a superchip"),
    "b200": (50.0, "a DGX B200's eight 400 Gb/s cards"),
    "b300": (100.0, "a DGX B300's eight 800 Gb/s cards"),
    "gb200": (50.0, "one 400 Gb/s card a GPU"),
    "gb300": (100.0, "one 800 Gb/s card a GPU"),
    "mi250x": (12.5, "LUMI's and Frontier's four 200 Gb/s cards for eight devices"),
    "mi3": (50.0, "one 400 Gb/s card a GPU, as in AMD's reference design"),
}
_FALLBACK_NETWORK = (3.0, "25 Gb/s for each GPU, as nothing is known")
_NETWORK_SHARE = 0.80
"""Fraction of the line rate that collectives and large messages reach."""
_NETWORK_LATENCY_S = 14e-6
"""A hop between nodes."""
_START_S = 8.4e-6
"""The start of a ring. Both are of NCCL's tuning tables (src/graph/tuning.cc), for its protocol of large messages."""


@dataclass(frozen=True)
class Machine:
    """What a plan runs on."""

    gpu: Gpu
    rates: Rates
    nodes: int
    wires: Wires
    guessed: tuple[str, ...]
    measured: Measured | None = None
    """What a calibration profile says of the GPU."""
    node_memory_bytes: float | None = None
    """Memory of one node's host; None where it is not known."""
    profile: str = ""
    """Where the GPU's rates are from: its profile, or what they are derived from."""

    @property
    def on_cpu(self) -> bool:
        """Whether ranks run on a CPU, sharing its cores and memory."""
        return self.measured is not None and self.measured.on_cpu

    @property
    def gpus(self) -> int:
        """GPUs in all, or ranks on CPUs."""
        return self.nodes * self.wires.gpus_per_node

    @property
    def host_bytes(self) -> float | None:
        """Host memory for each GPU: its share of the node's, or a superchip's own; None if not known."""
        if self.node_memory_bytes is not None:
            return self.node_memory_bytes / self.wires.gpus_per_node
        return None if self.gpu.host_memory_gib is None else self.gpu.host_memory_gib * 2**30

    @property
    def memory_bytes(self) -> float:
        """Memory of one GPU: as the driver reported it to the profile, else nominal; of a CPU a rank's part."""
        whole = (self.measured.profile.memory_gib if self.measured else self.gpu.memory_gib) * 2**30
        return whole / self.wires.gpus_per_node if self.on_cpu else whole


def parse_cluster(spelling: str) -> Cluster:
    """`8xh100` is one node of eight, `16x8xa100-80gb` sixteen of them, `16xleonardo` sixteen of a site or profile."""
    if site := _SITE.fullmatch(spelling):
        nodes, name = site.groups()
        if name.lower() in site_names() or name.endswith(".toml"):
            _require_possible(spelling, name, int(nodes or 1))
            return completed(Cluster(name=name, nodes=int(nodes or 1)), field="--cluster")
    found = _SPELLING.fullmatch(spelling.lower())
    if found is None:
        raise UserError(
            f"--cluster = {spelling} is not understood; write 8xh100, 16x8xa100-80gb (nodes × GPUs) or 16xleonardo"
        )
    nodes, gpus, gpu = found.groups()
    _require_possible(spelling, gpu, int(nodes or 1), int(gpus))
    return Cluster(nodes=int(nodes or 1), gpus_per_node=int(gpus), gpu=_gpu(gpu).key)


def _require_possible(spelling: str, name: str, nodes: int, gpus_per_node: int = 1) -> None:
    rank = "rank" if name == CPU else "GPU"
    if 0 in (nodes, gpus_per_node):
        raise UserError(
            f"--cluster = {spelling} has no {rank}; write at least one node and one {rank} per node, as 1x{name}"
        )
    if gpus_per_node > MOST_GPUS_PER_NODE:
        raise UserError(
            f"--cluster = {spelling} has {gpus_per_node:,} {rank}s per node, and at most {MOST_GPUS_PER_NODE:,} are "
            f"possible; write the nodes too, as {gpus_per_node // 8}x8x{name}"
        )
    if nodes > _MOST_NODES:
        raise UserError(
            f"--cluster = {spelling} has {nodes:,} nodes, and at most {_MOST_NODES:,} are possible; give fewer"
        )


def spelled(cluster: Cluster) -> str:
    """The machines as `--cluster` would name them."""
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.name}" if cluster.name else f"{nodes}{cluster.gpus_per_node}x{cluster.gpu}"


def machines_of(job: Job, spelling: str | None = None) -> Cluster:
    """Where a job's plan runs: `--cluster`, else the job's own section, with as many machines as its layout fills."""
    return parse_cluster(spelling) if spelling else completed(job.cluster, ranks_of(job.layout))


def any_machines(ranks: int) -> Cluster:
    """Some machines with this many GPUs, for predictions of memory, which depend on nothing else of them."""
    each = gcd(ranks, 8)
    return Cluster(nodes=ranks // each, gpus_per_node=each, gpu="h100")


def machine_of(cluster: Cluster, *, profiled: bool = True) -> Machine:
    """The machine of a cluster section; cluster.links may say `node` (GB/s a GPU) and `network` (GB/s a node).

    Without `profiled` it is the datasheet's, ignoring any measurements.
    """
    if cluster.gpu is None:
        raise UserError(
            "cluster.gpu is not given, and a plan needs one; set it to h100, a100-80gb or another known GPU, or give "
            "--cluster 8xh100"
        )
    gpu, links = _gpu(cluster.gpu), cluster.links or {}
    if profiled:
        require_given_profile_of(gpu.key)
    found = find_profile(gpu.key, cluster.gpus_per_node) if profiled else None
    profile = None if found is None else found.profile
    measured = None if profile is None else measured_of(profile, cluster.gpus_per_node)
    if measured is not None and measured.on_cpu:
        gpu = measured.profile.as_gpu()  # as this many ranks share it
    rates = measured_rates(profile) if profile and not is_known(gpu) else rates_of(gpu)
    guessed = _guesses(gpu, rates) if profile is None else _of_other_ranks(profile, cluster.gpus_per_node)
    if unknown := sorted(set(links) - {"node", "network"}):
        raise UserError(
            f"cluster.links has {unknown[0]!r}, which is not a link; give node (GB/s per GPU) or network (GB/s per "
            "node)"
        )
    wires, said = _wires(cluster, gpu, rates)
    if measured is not None:
        wires, known = measured.wires(wires, given=set(links))
        said = {link: why for link, why in said.items() if link not in known}
    node_bytes = None if cluster.host_memory_gib is None else cluster.host_memory_gib * 2**30
    about = f"{gpu.key}, {found.words}" if found else f"{gpu.key}, none; rates: {rates.origin}"
    return Machine(gpu, rates, cluster.nodes, wires, (*guessed, *said.values()), measured, node_bytes, about)


def usual_compute(cluster: Cluster) -> str:
    """What models are trained in on these machines if nobody says: fp16 on GPUs that came before bf16."""
    peak = machine_of(cluster).gpu.peak
    return "fp16" if "fp16" in peak and "bf16" not in peak else AUTO


def _of_other_ranks(profile: Profile, ranks: int) -> list[str]:
    """What a CPU's profile does not say of this number of ranks, which share its cores."""
    if not profile.on_cpu or profile.ranks == ranks:
        return []
    nproc = f" --nproc {ranks}" if ranks > 1 else ""
    had = "1 rank has" if profile.ranks == 1 else f"{profile.ranks} ranks have"
    remedy = f"meshwright calibrate{nproc} measures them"
    return [f"rates of {ranks} rank{'s' if ranks > 1 else ''} on this CPU: from those that {had}; {remedy}"]


def _guesses(gpu: Gpu, rates: Rates) -> list[str]:
    """What is not measured on a GPU without a profile."""
    guesses = [f"kernel efficiency of {gpu.key}: no profile; meshwright calibrate makes one"]
    if rates.guess:
        guesses = [
            f"kernels and links of {gpu.key}: {rates.guess}; meshwright calibrate measures them",
            f"driver and communicators of {gpu.key}: their memory is guessed to be as on NVIDIA's GPUs",
        ]
    if gpu.memory_bandwidth_bytes_per_s is None:
        lowest = f"guessed to be {UNKNOWN_BANDWIDTH / 1e12:g} TB/s, the least of such parts"
        guesses.append(f"memory bandwidth of {gpu.key}: not published, {lowest}")
    return guesses


def _gpu(key: str) -> Gpu:
    """A GPU of the table, or one known only from a profile."""
    try:
        return gpu_by_key(key)
    except UserError as error:
        profile = profile_of(key)
        if profile is not None:
            return profile.as_gpu()
        if key == CPU:
            raise UserError(
                "cpu has no calibration profile, and a plan for a CPU needs one; run meshwright calibrate on it"
            ) from None
        near = str(error).partition("; ")[2].partition(", or")[0]
        raise UserError(
            f"the GPU {key!r} is not in the hardware table and has no calibration profile; {near}, or run meshwright "
            "calibrate on it and name it as its profile does"
        ) from None


def _wires(cluster: Cluster, gpu: Gpu, rates: Rates) -> tuple[Wires, dict[str, str]]:
    """The links as given or by default, and which were guessed."""
    links, guessed = cluster.links or {}, {}
    if "node" in links:
        node = links["node"] * 1e9
    elif gpu.gpu_link is not None:
        node = gpu.gpu_link.bytes_per_s * rates.collective
    elif gpu.key == CPU:
        # Through memory: a message is copied into it and out again.
        node = (gpu.memory_bandwidth_bytes_per_s or UNKNOWN_BANDWIDTH) / 4
        if cluster.gpus_per_node > 1:
            guessed["node"] = (
                "links between ranks: a quarter of a copy's rate; meshwright calibrate --nproc "
                f"{cluster.gpus_per_node} measures them"
            )
    else:
        # Through the host's bridge: both directions of the card's own lanes, shared with what the host does.
        node = (gpu.host_link.bytes_per_s if gpu.host_link else 12e9) * 0.5
        guessed["node"] = "links between GPUs: half of their PCIe lanes"
    if "network" in links:
        network = links["network"] * 1e9 / cluster.gpus_per_node * _NETWORK_SHARE
    else:
        usual, why = next((v for k, v in _USUAL_NETWORK.items() if gpu.key.startswith(k)), _FALLBACK_NETWORK)
        if gpu.key == CPU:
            usual, why = usual / cluster.gpus_per_node, "25 Gb/s for each machine, as nothing is known"
        network = usual * 1e9 * _NETWORK_SHARE
        if cluster.nodes > 1:
            guessed["network"] = f"network between nodes: {why}"
    wires = Wires(cluster.gpus_per_node, node, rates.node_latency_s, network, _NETWORK_LATENCY_S, _START_S)
    return wires, guessed
