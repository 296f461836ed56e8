"""What a rank holds at its fullest moment, as named terms in bytes.

Activations are the model's own count of what its modules save, divided as the layout shards it and adjusted for what a
program does differently; micro-batches in flight are those of the schedule's table. Layers of a mixture without experts
are counted as if they had some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from meshwright.cost import (
    Elements,
    Frozen,
    in_whole_lines,
    layer_elements,
    segments_of,
    sharers,
    stage_elements,
    stage_frozen,
    state_bytes,
)
from meshwright.job import Job
from meshwright.layout import casts_from, encoder_bytes, holdings_of_rank
from meshwright.pipeline import Table, unchecked_table
from meshwright.plan.backward import in_encoder, passing_bytes, unwritten_bytes
from meshwright.plan.compute import loss_chunks, products_of, tokens_of
from meshwright.plan.copies import copies_of
from meshwright.plan.extra_tokens import extra_bytes, restored_bytes, waiting_bytes
from meshwright.plan.groups import stage_ranges
from meshwright.plan.halves import InFlight, halves_of_rank, head_bytes, incoming_bytes
from meshwright.plan.kept import block_bytes, sizes_of
from meshwright.plan.offload import move_to_host
from meshwright.plan.reserve import communicator_bytes, reserve_bytes
from meshwright.plan.software import Software
from meshwright.plan.states import Terms, frozen_terms, gathered_terms, state_terms, working_bytes


@dataclass(frozen=True)
class RankMemory:
    """A pipeline rank's memory: the terms that the allocator counts, and what is outside of it."""

    rank: int
    terms: Terms
    fragments: float
    outside: float
    host: float = 0.0
    """Bytes in the host's memory instead."""
    gap: float = 0.0
    """What the allocator holds idle, and gives back when memory is short."""

    @property
    def allocated(self) -> float:
        """What `max_memory_allocated` would say."""
        return sum(self.terms.values())

    @property
    def reserved(self) -> float:
        """What the allocator takes from the device."""
        return self.needed + self.gap

    @property
    def needed(self) -> float:
        """What the allocator cannot do without."""
        return self.allocated + self.fragments

    @property
    def device(self) -> float:
        """What the device reports as used."""
        return self.reserved + self.outside


def rank_memory(
    job: Job, software: Software, layers: list[int], modes: list[str], table: Table | None, rank: int
) -> RankMemory:
    """A pipeline rank's memory; `layers` are the stages' numbers of layers, `modes` every layer's recomputation."""
    held = [0] if table is None else [stage % len(layers) for stage in table.stages_of(rank)]
    places = stage_ranges(layers)
    elements = sum(
        (stage_elements(job, places[one], first=one == 0, last=one == len(layers) - 1) for one in held), Elements()
    )
    blocks = sum((stage_elements(job, places[one], first=False, last=False) for one in held), Elements())
    trained = sum(
        (stage_elements(job, places[one], first=one == 0, last=one == len(layers) - 1, trained=True) for one in held),
        Elements(),
    )
    owned = [[modes[layer] for layer in places[place]] for place in held]
    together = max((len(segment) for own in owned for segment in segments_of(own)), default=1)
    at_once = max(1 + job.layout.prefetch, together)
    at_once = min(at_once, max(map(len, owned))) if software.own else at_once
    frozen = sum(
        (stage_frozen(job, layers[one], first=one == 0, last=one == len(layers) - 1) for one in held), Frozen()
    )
    states = state_terms(job, software, trained, min(1.0, blocks.total / elements.total), at_once)
    states |= frozen_terms(job, frozen)
    if software.own:
        copies = copies_of(job, layers, table, rank)
        shared = (part.owned(job) if job.layout.zero_stage else part.total for part in copies)
        states["optimizer states"] -= state_bytes(job, *shared)
    if software.own and casts_from(job) is not None:  # as they are and transposed
        copied = sum(columns * inner for _, columns, inner in products_of(job, software))
        states["weights in fp8"] = 2.0 * copied * job.model.blocks
    first, last, starts = 0 in held, len(layers) - 1 in held, [place == 0 for place in held]
    if (still := elements.total - trained.total) > 0:
        whole = sharers(job) if job.layout.zero_stage == 3 else 1
        states["frozen weights"] = states.get("frozen weights", 0.0) + working_bytes(job) * still / whole
    if table is None and software.own:
        moments = own_moments(job, software, modes, states)
    elif table is not None and software.own:
        ends = [place == len(layers) - 1 for place in held]
        moments = _own_pipeline_moments(job, software, owned, ends, table, rank, elements.total, starts=starts)
    else:
        ends = [place == len(layers) - 1 for place in held]
        moments = _moments(job, software, owned, ends, table, rank, starts=starts, last=last)
    if job.accumulation == 1 and table is None and not software.own and not software.weights_apart:
        # Gradients appear as the backward frees activations: only the excess over those adds to the peak.
        for moment in moments:
            moment["gradients"] = max(0.0, states["gradients"] - sum(moment.values()))
    moments, host = [states | moment for moment in moments], 0.0
    if job.memory.offload:
        largest = max(block_bytes(job, software, mode)[0] for mode in set(modes))
        all_of_a_step = states | {"activations": max(moment["activations"] for moment in moments)}
        host = move_to_host(job, all_of_a_step, largest, layer_elements(job).total, together)
        for moment in moments:
            move_to_host(job, moment, largest, layer_elements(job).total, together)
    terms = max(moments, key=lambda moment: sum(moment.values()))
    terms["workspaces"] = software.workspace_bytes
    rounded, gap = reserve_bytes(job, software, sum(terms.values()), first=first, last=last)
    outside = software.context_bytes + communicator_bytes(job, software)
    return RankMemory(rank, terms, rounded, outside, host, gap)


def _moments(
    job: Job,
    software: Software,
    modes: list[list[str]],
    ends: list[bool],
    table: Table | None,
    rank: int,
    *,
    starts: list[bool],
    last: bool,
) -> list[Terms]:
    """What a rank's stages hold besides the states when their memory may be fullest: in the backward of a block, and in
    the loss, when all is kept for the backward."""
    held = _activations(job, software, modes, ends, table, rank, starts=starts)
    moments = [held | {"a block's backward": passing_bytes(job, software)}]
    if last:
        loss = {"activations": held["activations"], **_loss(job, software)}
        if gathered_terms(job, software, 1, tables=True):  # no block's parameters are there, and no gradients yet
            loss["gathered parameters"] = 2.0 * job.model.vocab_size * job.model.width / job.layout.tp
            loss["gradients before they are reduced"] = 0.0
        moments.append(loss)
    return moments


def _own_pipeline_moments(
    job: Job,
    software: Software,
    modes: list[list[str]],
    ends: list[bool],
    table: Table,
    rank: int,
    parameters: float,
    *,
    starts: list[bool],
) -> list[Terms]:
    """The same of our own pipelines, with most micro-batches in flight: in the backward of a block, and in the loss.

    Where all forwards come before the first backward, there are no gradients yet; they are after it, with one
    micro-batch less. Torch frees no parameters after a backward inside a pipeline: then zero 3 has gathered them all.
    """
    held = _activations(job, software, modes, ends, table, rank, starts=starts)
    moments = [held | {"a block's backward": passing_bytes(job, software)}]
    if any(ends):
        moments[0] |= {"logits and loss": waiting} if (waiting := waiting_bytes(job)) else {}
        moments.append({"activations": held["activations"], **_loss(job, software)})
    each = job.accumulation // table.parameter_copies
    in_flight = max(sum(held) for held, _ in _holdings(job, table, rank))
    after = {"activations": held["activations"] * (1 - 1 / in_flight)}
    if in_flight == each * len(modes):
        none = {"gradients": 0.0, "gradients before they are reduced": 0.0}
        moments = [moment | none for moment in moments] + [after]
    if job.layout.zero_stage == 3:
        moments.append(after | {"gathered parameters": working_bytes(job) * parameters})
    return moments


def _activations(
    job: Job,
    software: Software,
    modes: list[list[str]],
    last: list[bool],
    table: Table | None,
    rank: int,
    *,
    starts: list[bool],
) -> Terms:
    """What a rank's stages keep of the micro-batches in flight, and what a backward restores on top; `modes` are those
    of each stage's blocks, `last` says which stage sends its result to no other, `starts` which has the encoder."""
    sizes = {mode: block_bytes(job, software, mode) for mode in {mode for own in modes for mode in own}}
    boundary = sizes_of(job, "full").get("input", 0.0)
    incoming = incoming_bytes(job, software)
    kept, between, remade = [], [], 0.0
    for own, begins, final in zip(modes, starts, last, strict=True):
        sent = boundary if table is not None and not final else 0.0
        ends = extra_bytes(job, software, own) if final else 0.0
        kept.append(sum(sizes[mode][0] for mode in own) + sent + ends + (encoder_bytes(job) if begins else 0))
        further = restored_bytes(job, software, own[-1]) if final and own else 0.0
        again = (sum(sizes[own[place]][1] for place in segment) for segment in segments_of(own))
        remade = max([remade, *(size + further for size in again)])
        ahead = len(own) * incoming + (head_bytes(job) if final else 0.0)
        # The first stage has no gradients of inputs to compute first; others' peaks are met without what ours keeps.
        between.append(0.0 if begins or not software.own else ahead)
    moments = _holdings(job, table, rank)
    fullest = max(sum(map(mul, held, kept)) + sum(map(mul, halves, between)) for held, halves in moments)
    return {"activations": fullest, "a block's forward recomputed": remade}


def _holdings(job: Job, table: Table | None, rank: int) -> Sequence[InFlight]:
    """Micro-batches of each stage at a rank's fullest moments; `table` may be that of fewer micro-batches than the
    job's, which only GPipe's moments depend on: all of its forwards come first."""
    if table is None:
        return [((1,), (0,))]
    none = (0,) * len(table.stages_of(rank))
    if table.schedule == "gpipe":
        return [((job.accumulation,) * len(none), none)]
    about = (table.schedule, table.ranks, table.micro_batches, table.virtual_stages, rank)
    return halves_of_rank(*about) if table.splits_backward else [(held, none) for held in _cached_holdings(*about)]


@lru_cache(maxsize=8192)
def _cached_holdings(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, rank: int
) -> Sequence[tuple[int, ...]]:
    return holdings_of_rank(unchecked_table(schedule, ranks, micro_batches, virtual_stages), rank)


def _loss(job: Job, software: Software) -> Terms:
    """The head's share: whole logits, or our chunks of them with their gradients."""
    tokens, width = tokens_of(job), job.model.width
    vocabulary = -(-job.model.vocab_size // job.layout.tp)
    if software.logit_bytes is not None:
        return {"logits and loss": software.logit_bytes * tokens * vocabulary}
    each = job.precision.number_bytes
    _, rows = loss_chunks(job)
    lines = in_whole_lines(vocabulary)
    if job.model.adapter is not None:  # a frozen head has no gradient
        frozen = float(each * (rows * lines + tokens * width))
        return {"logits and loss": frozen, "final norm": 2.0 * each * tokens * width}
    # The weight's gradient in 32 bits exists along with a chunk's logits, whose memory their gradient reuses; then with
    # what continues in the weight's own format.
    made = 4.0 * lines * width + max(each * rows * lines, each * vocabulary * width if each == 2 else 0.0)
    made += each * (tokens * width + (lines * width if lines > vocabulary else 0)) + waiting_bytes(job)
    if job.precision.format == "fp8" and job.precision.fp8_head:
        # The weight and a chunk's gradient in fp8, each twice; and a chunk's share of the weight's, before it is added.
        made += 2.0 * lines * (width + rows) + 4.0 * lines * width
    return {"logits and loss": made, "final norm": 2.0 * each * tokens * width}


def _shared_moments(job: Job, states: Terms) -> tuple[Terms, Terms]:
    """Where zero 3 shares the parameters: what is gathered in the loss, the head alone; and what waits to be reduced in
    the backward of a block, its own gradients or the head's, of which only the copy in 32 bits is left.

    With the first, rehearsed ranks of Llama 3 8B on an H200 had what was planned within 5 MB of 72 GB.
    """
    if "gradients before they are reduced" not in states or job.layout.zero_stage < 3:
        return {}, {}
    table = job.model.vocab_size * job.model.width / job.layout.tp
    reduced = 0.0 if job.model.adapter is not None else table
    waiting = max((working_bytes(job) + 4.0) * layer_elements(job).total, 4.0 * reduced)
    return {"gathered parameters": working_bytes(job) * table}, {"gradients before they are reduced": waiting}


def own_moments(job: Job, software: Software, modes: list[str], states: Terms) -> list[Terms]:
    """Of our own step without a pipeline, what is held besides the states when memory may be fullest, gradients
    included.

    That is in the loss, when all is kept for the backward; in the backward of the last block or of the first, with what
    it recomputes and what passes through it; or when the last gradient, the embedding's, has been computed. Of segments
    the last may be shorter than the others: then it may be in the one before.
    """
    sizes = {mode: block_bytes(job, software, mode) for mode in set(modes)}
    again = {mode: max(0.0, size[1] - unwritten_bytes(job, software, mode)) for mode, size in sizes.items()}
    encoder = encoder_bytes(job)
    further = extra_bytes(job, software, modes)
    kept = encoder + sum(sizes[mode][0] for mode in modes) + further
    each = job.precision.number_bytes
    learned = job.model.trains_decoder
    table = job.model.vocab_size * job.model.width / job.layout.tp if learned and job.model.adapter is None else 0.0
    whole = states["gradients"]
    owned = stage_elements(job, range(job.model.blocks), first=True, last=True, trained=True)
    per_entry = whole / max(1.0, owned.total)
    layer = per_entry * layer_elements(job).total if learned else 0.0
    # With several micro-batches a step, the gradients of those before are there all the time.
    before = whole if job.accumulation > 1 else 0.0
    # The head's gradient: of a tied table it waits for the embedding's, of its own it is one of the gradients.
    waiting = each * table if job.model.tied else 0.0
    pending = waiting or (0.0 if before else per_entry * table)
    last = whole + (each * table if before else waiting)
    segments = segments_of(modes)
    longest = max(segments, key=lambda segment: (len(segment), segment.start))

    passing = passing_bytes(job, software)
    in_loss, in_blocks = _shared_moments(job, states)

    def backward_in(segment: range, gradients: float, *, first: bool = False) -> Terms:
        """When a segment was recomputed, and its backward starts or has come to its first block."""
        missing = segment[:1] if first else segment
        return {
            "activations": encoder
            + sum(sizes[mode][0] for mode in modes[: segment.stop])
            + (further if segment.stop == len(modes) else 0.0),
            "gradients": gradients,
            "a block's forward recomputed": sum(again[modes[place]] for place in missing)
            + (restored_bytes(job, software, modes[-1]) if segment.stop == len(modes) else 0.0),
            "a block's backward": passing,
            **in_blocks,
        }

    return [
        {"activations": kept, "gradients": before, **_loss(job, software), **in_loss},
        backward_in(segments[-1], before + pending + waiting_bytes(job)),
        *(
            backward_in(segment, before + pending + (0.0 if before else (len(modes) - segment.stop) * layer))
            for segment in {longest, segments[0]}
            if len(segment) > 1
        ),
        backward_in(segments[0], before or whole - per_entry * table - layer + waiting, first=True),
        *([in_encoder(job, encoder, last)] if encoder else []),
        {"activations": 0.0, "gradients": last, "a block's forward recomputed": 0.0},
    ]
