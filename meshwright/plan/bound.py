"""Every valid layout of a job on a machine, with the least time and memory each can take, as arrays over all of them.

A bound leaves out what can only add: sends between stages, launches, bubbles beyond filling and draining a pipeline,
recomputed tensors, the loss. So a layout whose bound is slower than another's prediction cannot be the faster one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost import MASTER_BYTES, Elements, state_bytes
from meshwright.job import Job
from meshwright.layout import gathers_fp8
from meshwright.plan.communication import CONTENTION, Group, all_gather_s, all_reduce_s
from meshwright.plan.families import Family, families_of
from meshwright.plan.groups import groups_of
from meshwright.plan.kernels import device_of
from meshwright.plan.machine import Machine
from meshwright.plan.reserve import COMMUNICATOR_BYTES, FRAGMENTS
from meshwright.plan.software import CONTEXT_BYTES
from meshwright.plan.space import (
    BUDGET,
    KINDS,
    MODES,
    Pipe,
    hybrid_sizes,
    layout_with,
    pipes_of,
    shardings_of,
    with_layout,
    with_way,
)
from meshwright.plan.step import STRAGGLERS
from meshwright.plan.update import update_s

_ROUNDING = 1 - 1e-6
"""Bytes are whole numbers, and sums of floats differ in their last digits."""
WORTH = 0.002
"""Share of a step that hybrid sharding must save over sharding over all replicas, which takes less memory."""
_CONTENTION = 1 + CONTENTION
"""What a second of transfers may add to a step, at most."""
_DEGREES = ("tp", "cp", "ep")
_BY_ROW = (
    "f",
    "p",
    "z",
    "tp",
    "cp",
    "ep",
    "pp",
    "virtual",
    "splits",
    "zero",
    "shard",
    "dp",
    "times",
    "owners",
    "expert_owners",
    "backward",
    "kept",
)


@dataclass(frozen=True)
class Layouts:
    """All layouts: parallel arrays with one entry per layout."""

    job: Job
    families: list[Family]
    pipes: list[Pipe]
    shardings: list[tuple[int, int]]
    gpus: int
    time_s: Any
    memory_bytes: Any
    family: Any
    pipe: Any
    sharding: Any
    mode: Any
    offload: Any

    def __len__(self) -> int:
        return len(self.time_s)

    def is_budget(self, index: int) -> bool:
        """Whether a layout's recomputation is to be as little as fits."""
        return bool(self.mode[index] == BUDGET)

    def job_at(self, index: int) -> Job:
        """One of the layouts as a job; without recomputation where a budget decides."""
        own, pipe = self.families[self.family[index]].job, self.pipes[self.pipe[index]]
        degrees, (zero, shard) = own.layout, self.shardings[self.sharding[index]]
        replicate = self.gpus // (degrees.tp * degrees.cp * pipe.pp * shard)
        way = with_way(self.job, own.precision.format, own.run.compiles)
        made = with_layout(way, pipe, degrees, own.batch.micro_batch, zero, shard, replicate, int(self.mode[index]))
        if self.offload[index]:
            made = made.model_copy(update={"memory": made.memory.model_copy(update={"offload": ("optimizer",)})})
        return made


def bounded(job: Job, machine: Machine, allow: frozenset[str], room_bytes: float, *, at_once: bool = False) -> Layouts:
    """Least seconds and least bytes of every valid layout; a budget's seconds are those within `room_bytes`.

    With `at_once` only layouts whose ranks compute one micro-batch per step.
    """
    families = list(families_of(job, machine, allow, at_once=at_once))
    pipes, shardings = pipes_of(job, machine.gpus, allow), shardings_of(machine.gpus)
    rows = _Rows(job, machine, families, pipes, shardings, at_once=at_once)
    time, memory = rows.bounds(room_bytes, offload="offload" in allow)
    shape = time.shape
    family, pipe, sharding = (np.broadcast_to(one[:, None, None], shape) for one in (rows.f, rows.p, rows.z))
    mode = np.broadcast_to(np.arange(shape[1])[None, :, None], shape)
    offload = np.broadcast_to(np.arange(shape[2])[None, None, :], shape)
    parts = (one[np.isfinite(time)] for one in (time, memory, family, pipe, sharding, mode, offload))
    return Layouts(job, families, pipes, shardings, machine.gpus, *parts)


class _Rows:
    """The valid combinations of a family, a pipeline and a sharding, and what they take in each mode."""

    def __init__(
        self,
        job: Job,
        machine: Machine,
        families: list[Family],
        pipes: list[Pipe],
        shardings: list[tuple[int, int]],
        *,
        at_once: bool,
    ) -> None:
        self.job, self.machine, self.families, self.pipes = job, machine, families, pipes
        self._at_once = at_once
        self.f, self.p, self.z = self._valid(shardings)
        self.tp, self.cp, self.ep = (
            np.array([getattr(one.job.layout, axis) for one in families], dtype=int)[self.f] for axis in _DEGREES
        )
        self.pp, self.virtual = (
            np.array([getattr(pipe, name) for pipe in pipes])[self.p] for name in ("pp", "virtual")
        )
        self.splits = np.array([pipe.splits_backward for pipe in pipes])[self.p]
        self.zero, self.shard = (np.array(one)[self.z] for one in zip(*shardings, strict=True))
        self.dp = machine.gpus // (self.tp * self.cp * self.pp)
        micro = np.array([one.job.batch.micro_batch for one in families], dtype=int)[self.f]
        self.times = job.batch.global_batch // (micro * self.dp)  # micro-batches a step
        self.owners = np.where(self.zero > 0, self.shard * self.cp, 1)
        self.expert_owners = np.where(self.zero > 0, self.tp * self.shard * self.cp // self.ep, 1)
        self._dense = job.model.experts.first_dense if job.model.experts else 0
        self.backward = np.array([one.backward_s for one in families]).reshape(-1, len(KINDS))[self.f]
        self.kept = np.array([one.kept_bytes for one in families]).reshape(-1, len(KINDS))[self.f]

    def _valid(self, shardings: list[tuple[int, int]]) -> tuple[Any, ...]:
        gpus, batch = self.machine.gpus, self.job.batch.global_batch
        layouts = [one.job.layout for one in self.families]
        group = np.array([one.tp * one.cp for one in layouts], dtype=int)[:, None]
        micro = np.array([one.job.batch.micro_batch for one in self.families], dtype=int)[:, None]
        compiled = np.array([one.job.run.compiles for one in self.families], dtype=bool)[:, None]
        pp = np.array([pipe.pp for pipe in self.pipes])[None, :]
        loops = np.array([pipe.schedule == "interleaved" for pipe in self.pipes])[None, :]
        splits = np.array([pipe.splits_backward for pipe in self.pipes])[None, :]
        dp = np.maximum(1, gpus // (group * pp))
        pairs = (gpus % (group * pp) == 0) & (batch % (micro * dp) == 0)
        pairs &= ~loops | (batch // (micro * dp) % pp == 0)
        if self._at_once:
            pairs &= batch == micro * dp
        # Halves of a backward are not compiled; what is not compiled for their sake runs nothing else.
        pairs &= np.where(splits, ~compiled, compiled == self.job.run.compiles)
        families, pipes = np.nonzero(pairs)
        tp, cp, ep = (np.array([getattr(one, axis) for one in layouts], dtype=int)[families] for axis in _DEGREES)
        dp, pipelined, splits = dp[families, pipes], pp[0, pipes] > 1, splits[0, pipes]
        hybrids = hybrid_sizes(gpus, self.machine.wires.gpus_per_node)
        valid = np.empty((len(families), len(shardings)), dtype=bool)
        for column, (zero, shard) in enumerate(shardings):  # all at once would take gigabytes
            owners = cp * shard if zero else 1
            fits = (dp % shard == 0) & (tp * owners % ep == 0)  # experts are distributed over ranks of other tokens
            fits &= owners > 1 if zero else cp == 1
            if shard not in hybrids:
                fits &= dp == shard
            if zero == 2:  # where gradients stay whole until the step's end, it is zero 1
                fits &= ~pipelined
            if zero == 3:  # halves of a backward need their parameters in between
                fits &= ~splits
            valid[:, column] = fits
        rows, columns = np.nonzero(valid)
        return families[rows], pipes[rows], columns

    def _drop(self, keep: Any) -> None:
        """Leave out rows."""
        for name in _BY_ROW:
            setattr(self, name, getattr(self, name)[keep])

    def _of(self, name: str, place: int | None = None) -> Any:
        """A number of every family, by row."""
        values = [getattr(one, name) for one in self.families]
        return np.array([value if place is None else value[place] for value in values], dtype=float)[self.f]

    def _of_pipe(self, values: list[float]) -> Any:
        return np.array(values, dtype=float)[self.p]

    def bounds(self, room_bytes: float, *, offload: bool) -> tuple[Any, Any]:
        """Seconds and bytes, by row, mode and offload; infinite seconds where a mode does not exist."""
        links, saved = self._links()
        whole = self._seconds(links, self.backward[:, 0], self.backward[:, 0])[:, 0]
        keep = (self.zero == 0) | (self.shard == self.dp) | (_CONTENTION * saved > WORTH * whole)
        self._drop(keep)
        links = {name: values[keep] for name, values in links.items()}
        base, blocks, sends = self._held()
        sent = sends * self.kept[:, KINDS.index("full")]  # a block's input
        sizes = (len(self.f), len(MODES), 2 if offload else 1)
        time, memory = np.full(sizes, np.inf), np.full(sizes, np.inf)
        for mode, kind in enumerate(KINDS):
            activations = blocks * self.kept[:, mode]
            if kind == "full":
                # This stands for segments of k blocks too, which keep 1/k of that and recompute k blocks at once: at
                # best as much of either. Only where it is more than two blocks' can that be less.
                whole = self.kept[:, 0]
                activations = np.where(activations > 2 * whole, np.sqrt(activations * whole), activations)
            # Without a pipeline, what is offloaded may be fullest when the last gradient is there and no activation is.
            there = np.stack([activations + sent, np.where(self.pp == 1, 0.0, activations + sent)], axis=1)
            memory[:, mode] = (base + there * (1 + FRAGMENTS))[:, : sizes[2]] * _ROUNDING
            time[:, mode] = self._seconds(links, self.backward[:, mode], self.backward[:, mode])[:, : sizes[2]]
        time[self.splits, KINDS.index("selective")] = np.inf  # halves of a backward keep nothing selectively
        memory[:, BUDGET] = room_bytes
        for place in range(sizes[2]):
            may_keep = ((room_bytes - base[:, place]) / (1 + FRAGMENTS) - sent) / blocks
            needed = (may_keep >= self.kept[:, 2]) & (may_keep < self.kept[:, 0]) & (self.pp == 1)
            needed &= self.job.model.extra_tokens == 0  # a budget does not count what their blocks keep
            mixed = self._mixed(may_keep)
            seconds = self._seconds(links, mixed, self.backward[:, 0])[:, place]
            time[:, BUDGET, place] = np.where(needed, seconds, np.inf)
        return time, memory

    def _mixed(self, may_keep: Any) -> Any:
        """A block's backward on average where blocks may keep so many bytes on average: no mixture of the three kinds
        of recomputation is below the lines between them."""
        none, selective, full = (self.kept[:, kind] for kind in range(3))
        fast, between, slow = (self.backward[:, kind] for kind in range(3))
        line = fast + (slow - fast) * (none - may_keep) / np.maximum(none - full, 1.0)
        upper = fast + (between - fast) * (none - may_keep) / np.maximum(none - selective, 1.0)
        lower = between + (slow - between) * (selective - may_keep) / np.maximum(selective - full, 1.0)
        by_two = np.where(may_keep >= selective, upper, lower)
        return np.clip(np.minimum(line, by_two), fast, None)

    def _held(self) -> tuple[Any, Any, Any]:
        """Bytes of the first rank without activations, as it is and with offload; and what `_flying` says."""
        alone = self.pp == 1
        layers = self._of_pipe([pipe.ranks[0] for pipe in self.pipes])
        ends = [self._of("ends_elements", place) for place in range(3)]
        turns = self._of_pipe([pipe.schedule == "zb-v" for pipe in self.pipes])  # and so has the head too
        plain, experts = self._elements(layers)
        blocks, others = plain + experts, np.where(alone, ends[2], ends[0] + turns * ends[1])
        elements, precision = blocks + others, self.job.precision
        gradient = min(precision.gradient_bytes, precision.number_bytes)
        each = (state_bytes(self.job, 1.0, 0.0), state_bytes(self.job, 0.0, 1.0))
        owned = (plain + others) / self.owners + experts / self.expert_owners
        updated = others - (turns * ends[1] if self.job.model.tied else 0.0)  # a tied table's copy has no states
        moments = each[0] * (plain / self.owners + experts / self.expert_owners) + each[1] * updated / self.owners
        flying = self._flying()
        # Gradients of micro-batches before, where there are any when memory is fullest.
        stages = np.where((self.virtual > 1) & ~self.splits, self.virtual, 1)
        before = np.where(alone, self.times > 1, flying[1] < self.times * stages)
        whole = (self.zero > 0) & ~alone | (self.zero == 1) & (self.times > 1)
        summed = np.where(before, gradient * np.where(whole, elements, owned), 0.0)
        states = MASTER_BYTES * owned + moments + summed
        narrow = precision.number_bytes < MASTER_BYTES
        copy = 2.0 if narrow else MASTER_BYTES if self.machine.gpus > 1 else 0.0
        working = np.where(self.zero < 3, copy * elements, 0.0)
        axes = sum((one > 1).astype(float) for one in (self.tp, self.cp, self.ep, self.pp, self.dp))
        outside = np.where(self.machine.on_cpu, 0.0, CONTEXT_BYTES + axes * COMMUNICATOR_BYTES)
        base = np.stack([states + working, working], axis=1) * (1 + FRAGMENTS) + outside[:, None]
        return base, *flying

    def _elements(self, layers: Any) -> tuple[Any, Any]:
        """Parameters of so many layers on a rank: experts', and all others."""
        plain, experts = (
            np.array([getattr(one.layer, part) for one in self.families])[self.f] for part in ("plain", "experts")
        )
        return layers * plain, np.maximum(0, layers - self._dense) * experts

    def _flying(self) -> tuple[Any, Any]:
        """Of how many blocks, and of how many stages that send their result on, the first rank holds a micro-batch
        when it begins its first backward."""
        stages = max(pipe.virtual for pipe in self.pipes)
        looped = np.minimum(self.times * self.virtual, (self.virtual + 1) * self.pp - 1)
        down = np.minimum(self.times, np.where(self.splits & (self.virtual > 1), 2, 1) * self.pp)  # the way down a V
        rounds, rest = np.divmod(looped, self.pp * self.virtual)
        blocks = np.zeros(len(self.f))
        for place in range(stages):
            layers = self._of_pipe([(*pipe.counts[:: pipe.pp], *[0] * stages)[place] for pipe in self.pipes])
            held = rounds * self.pp + np.clip(rest - place * self.pp, 0, self.pp)
            straight = down if place == 0 else 0
            blocks += np.where((self.virtual > 1) & ~self.splits, held, straight) * layers
        return blocks, np.where(self.pp == 1, 0, np.where((self.virtual > 1) & ~self.splits, looped, down))

    def _seconds(self, links: dict[str, Any], backward: Any, elsewhere: Any) -> Any:
        """Seconds if a block's backward takes so many on the first rank, and `elsewhere` on the others; as it is and
        with offload."""
        forward = self._of("forward_s")
        ends = [self._of("ends_s", place) for place in range(4)]
        places = [_places(pipe) for pipe in self.pipes]
        least = np.zeros(len(self.f))
        for rank in range(3):  # every rank does all of its work, after those before it began and before they end
            layers, before, first, head = (self._of_pipe([place[rank][part] for place in places]) for part in range(4))
            own = np.where(first > 0, backward, elsewhere)
            ahead = np.maximum(layers * forward + first * ends[0] + head * ends[2], layers * links["gather"])
            back = np.maximum(layers * own + first * ends[1] + head * ends[3], layers * links["scatter"])
            fill = before * np.maximum(forward, links["gather"])
            drain = np.where(self.splits, 0.0, before * np.maximum(elsewhere, links["scatter"]))
            least = np.maximum(least, self.times * (ahead + back) + fill + drain)
        # What is exchanged once a step can hide behind the passes of one micro-batch.
        most = self._of_pipe([max(pipe.ranks) for pipe in self.pipes])
        longest = most * np.maximum(backward, elsewhere) + ends[1] + ends[3]
        least += np.maximum(0.0, links["reduce"] - longest)
        least += np.maximum(0.0, links["regather"] - (most * forward + ends[0] + ends[2])) + self._of("step_s")
        both = np.stack([least + links["update"], least], axis=1)
        return both * (1 + STRAGGLERS * np.log2(self.machine.nodes)) * _ROUNDING

    def _links(self) -> tuple[dict[str, Any], Any]:
        """Transfers of a block's parameters and gradients with every micro-batch, and of a rank's once a step; and how
        many seconds of them sharding over all replicas would take more."""
        fewest: dict[int, int] = {}
        for pipe in self.pipes:
            fewest[pipe.pp] = min(fewest.get(pipe.pp, pipe.counts[0]), *pipe.ranks)
        alike = {(one.job.layout.tp, one.job.layout.ep): one for one in self.families}
        most, degrees = self.machine.gpus + 1, (self.tp, self.cp, self.ep, self.pp)
        sizes = (most, 1 + max(self.cp, default=1), 1 + max(self.ep, default=1), most, most)
        keys = [np.ravel_multi_index((*degrees, shard), sizes) for shard in (self.shard, self.dp)]
        unique, inverse = np.unique(np.concatenate(keys), return_inverse=True)
        different = zip(*(one.tolist() for one in np.unravel_index(unique, sizes)), strict=True)
        found = np.array([self._exchanged(each, alike[each[0], each[2]], fewest) for each in different])
        found = found.reshape(-1, 5)[inverse]
        own, all_shared = found[: len(self.f)].T, found[len(self.f) :].T
        gather, scatter, reduce, regather, replicas = own
        third, per_micro = self.zero == 3, (self.zero == 3) | (self.zero == 2) & (self.pp == 1)
        plain, experts = self._elements(self._of_pipe([fewest[pipe.pp] for pipe in self.pipes]))
        links = {
            "gather": np.where(third, gather, np.where(per_micro, gather / self.times, 0.0)),
            "scatter": np.where(per_micro, scatter + np.where(third, gather, 0.0), 0.0),
            "reduce": np.where(per_micro, 0.0, np.where(self.zero == 0, replicas, reduce)),
            "regather": np.where(per_micro | (self.zero == 0), 0.0, regather),
            "update": self._update_rate() * (plain / self.owners + experts / self.expert_owners),
        }
        more = np.maximum(0.0, all_shared - own)
        longest = self._of_pipe([max(pipe.ranks) for pipe in self.pipes])
        by_layer = longest * (self.times * more[1] + np.where(third, 2 * self.times, 1) * more[0])
        once = (more[2] + more[3]) * longest / self._of_pipe([fewest[pipe.pp] for pipe in self.pipes])
        tables = 1 + self._of("ends_elements", 2) / sum(self._elements(longest))
        return links, np.where(per_micro, by_layer, once) * tables

    def _exchanged(self, sizes: tuple[int, ...], family: Family, fewest: dict[int, int]) -> tuple[float, ...]:
        tp, cp, ep, pp, shard = sizes
        replicate = self.machine.gpus // (tp * cp * pp * shard)
        degrees = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp_shard": shard, "dp_replicate": replicate}
        wires = self.machine.wires
        job = self.job.model_copy(update={"layout": layout_with(self.job.layout, degrees)})
        groups = groups_of(job, wires.gpus_per_node)
        wide, block = self.job.precision.gradient_bytes, family.layer
        # Of experts only where every layer has some: the others have nothing to gather.
        block = Elements(block.plain, 0.0 if self._dense else block.experts)
        rank = block * fewest[pp]

        def parts(elements: Elements) -> list[tuple[float, Group]]:
            return [(elements.plain, groups.shard), (elements.experts, groups.expert_shard)]

        def scattered(elements: Elements) -> float:
            return sum(all_gather_s(wires, group, wide * count) for count, group in parts(elements))

        def among(elements: Elements) -> float:  # replicas, once a step
            shares = (wide * count / group.size for count, group in parts(elements))
            return sum(all_reduce_s(wires, groups.replicate, share) for share in shares)

        def gathered(elements: Elements) -> float:
            plain = all_gather_s(wires, groups.shard, (1.0 if gathers_fp8(job) else 2.0) * elements.plain)
            return plain + all_gather_s(wires, groups.expert_shard, 2.0 * elements.experts)

        replicas = all_reduce_s(wires, groups.data, wide * rank.plain)
        replicas += all_reduce_s(wires, groups.expert_data, wide * rank.experts)
        return gathered(block), scattered(block), scattered(rank) + among(rank), gathered(rank), replicas

    def _update_rate(self) -> float:
        """Seconds for each further parameter that a rank updates."""
        machine, many = self.machine, 1e9
        device = device_of(machine.gpu, machine.rates, self.job.precision.format, machine.measured)
        spread = self.job.model_copy(update={"layout": layout_with(self.job.layout, {"dp_shard": machine.gpus})})
        took = [update_s(spread, device, size, 2, own=True) for size in (many, 2 * many)]
        return max(0.0, took[1] - took[0]) / many


def _places(pipe: Pipe) -> list[tuple[float, float, bool, bool]]:
    """Of the first rank, the last, and the one of most layers between them: its layers, those of the stages that a
    micro-batch passes before it, and whether it has the embedding and the head."""
    ranks = pipe.ranks
    between = max(range(pipe.pp), key=lambda rank: (0 < rank < pipe.pp - 1, ranks[rank], rank))
    head = 0 if pipe.schedule == "zb-v" else pipe.pp - 1
    return [(ranks[rank], sum(pipe.counts[:rank]), rank == 0, rank == head) for rank in (0, between, pipe.pp - 1)]
