"""Job n of a seed: a small model with a combination of job settings, made to fit where only arithmetic decides.

Settings are drawn without asking which work together: the rules decide that, and a refused job is a valid result
too. Numbers (heads, tokens, layers, micro-batches) are made to fit the degrees, or nearly every job would be refused.
"""

from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from random import Random
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Job, job_of_table
from meshwright.layout import budget_span, ranks_of, require_layout, table_of
from meshwright.pipeline import SCHEDULES, require_schedule, unchecked_table
from meshwright.verify.documents import HELD_OUT
from meshwright.verify.generate_model import FAMILIES, add_encoder, add_extra_tokens, draw_shape
from meshwright.verify.generate_tuning import add_adapter, prefer
from meshwright.verify.mistakes import slip
from meshwright.verify.notation import in_a_line

Table = dict[str, Any]

RANKS = {2: 40, 3: 10, 4: 34, 6: 5, 8: 9, 12: 1, 16: 1}
"""How often each number of ranks is drawn: mostly few, since a job takes about a second of a core per rank."""
MOST_STAGE_RANKS = 6
"""A deeper pipeline has no other kind of rank, and takes minutes where ranks share a core."""
MOST_COMPILED_RANKS = 2
COMPILED_SHARE = 0.02
"""Of jobs with so few ranks: the compiler takes longer than all else in a check."""
KINDS = {"whole": 40, "adapter": 25, "encoder": 18, "extra tokens": 17}
"""What a job trains; each excludes the others."""
PREFERENCES_SHARE, STREAM_SHARE = 0.25, 0.15
"""Of the jobs that they do not exclude."""
COMPRESSIONS = ("topk", "fp16", "bf16", "int8", "powersgd")


@dataclass(frozen=True)
class Draw:
    """One drawn job, as the table of a job file; it may be invalid or refused."""

    seed: int
    number: int
    family: str
    table: Table

    @cached_property
    def job(self) -> Job:
        """The job; a mistake in the table raises UserError."""
        return job_of_table(self.table, f"draw {self.number}")

    @cached_property
    def refusal(self) -> str | None:
        """The sentence with which the rules refuse the job before any process starts."""
        return refusal_of(self.table, f"draw {self.number}")

    @property
    def name(self) -> str:
        """The draw in a line, its number first."""
        return f"{self.number} {self.family}: {in_a_line(self.table)}"


def refusal_of(table: Table, name: str) -> str | None:
    """The sentence with which a table is refused, as an invalid job or an impossible layout; None if it runs."""
    try:
        job = job_of_table(table, name)
        require_layout(job, ranks_of(job.layout))
    except UserError as error:
        return str(error)
    return None


def draw(seed: int, number: int) -> Draw:
    """Draw a job: a function of the two numbers alone."""
    rng = Random(f"{seed}/{number}")
    layout = _degrees(rng, rng.choices(tuple(RANKS), tuple(RANKS.values()))[0])
    table: Table = {"layout": layout}
    accumulation = _pipeline(rng, layout) if layout["pp"] > 1 else rng.choice((1, 1, 2, 3))
    _settings(rng, layout)
    family = rng.choice(tuple(FAMILIES))
    table["model"] = draw_shape(rng, family, layout, _stages(layout, accumulation))
    table["batch"] = _batch(rng, layout, accumulation, routes="experts" in table["model"])
    table["model"]["max_sequence_length"] = table["batch"]["sequence_length"] + rng.choice((0, 0, 5))
    table |= _training(rng, layout, table["batch"]["sequence_length"])
    _train_as(rng.choices(tuple(KINDS), tuple(KINDS.values()))[0], rng, table)
    table["memory"] = _memory(rng, table)
    if rng.random() < 1 / 6:
        slip(rng, table)
    return Draw(seed, number, family, table)


def _degrees(rng: Random, ranks: int) -> Table:
    """The prime factors of the ranks, each given to an axis."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), 1)
    for factor in _prime_factors(ranks):
        axis = rng.choice(tuple(degrees))
        if axis == "pp" and degrees["pp"] * factor > MOST_STAGE_RANKS:
            axis = "dp_shard"
        degrees[axis] *= factor
    return degrees


def _pipeline(rng: Random, layout: Table) -> int:
    """Choose the schedule and its numbers; returns the micro-batches of a step."""
    pp, schedule = layout["pp"], rng.choice(SCHEDULES)
    layout["schedule"] = schedule
    if schedule == "pipedream" and rng.random() < 0.8:  # otherwise it is refused with any other axis
        layout.update(dp_replicate=1, dp_shard=1, cp=1, tp=1)
        return 1
    held = rng.choice([v for v in (None, None, 1, 2, 3) if _runs(schedule, pp, 4 * pp, v)] or [None])
    if held is not None:
        layout["virtual_stages"] = held
    fitting = [m for m in range(1, 3 * pp + 1) if _runs(schedule, pp, m, held)]
    return rng.choice(fitting[:4] or [2])


def _runs(schedule: str, pp: int, micro_batches: int, held: int | None) -> bool:
    try:
        require_schedule(schedule, pp, micro_batches, held)
    except UserError:
        return False
    return True


def _settings(rng: Random, layout: Table) -> None:
    """The layout except its degrees and its pipeline."""
    layout["zero"] = rng.choice((None, 1, 2, 3) if layout["dp_shard"] > 1 else (None, 0, 1, 2, 3))
    layout["order"] = rng.choice(("pp-outside", "pp-outside", "dp-outside"))
    layout["bucket_mb"] = rng.choice((25.0, 25.0, 0.001, 0.01))
    layout["prefetch"] = rng.choice((1, 1, 0, 2, 3))
    if layout["tp"] > 1:
        layout["sp"] = rng.random() < 0.7
    if layout["cp"] > 1:
        layout["cp_method"] = rng.choice(("ring", "allgather", "ulysses"))
    if layout["dp_replicate"] > 1 and rng.random() < 0.3:
        layout |= _compression(rng, layout)


def _compression(rng: Random, layout: Table) -> Table:
    """Lossy compression has a reference only with replicas alone; elsewhere it sends everything."""
    alone = prod(layout[axis] for axis in ("dp_shard", "cp", "tp", "pp")) == 1
    return {
        "compress": rng.choice(COMPRESSIONS) if alone else "topk",
        "compress_ratio": rng.choice((0.01, 0.1, 0.5)) if alone else 1.0,
        "compress_after": rng.choice((0, 0, 1, 2)),
        "compress_rank": rng.choice((1, 2, 4)),
    }


def _train_as(kind: str, rng: Random, table: Table) -> None:
    """Add adapters, an encoder or extra tokens, and what the loss is computed from, in place."""
    if kind == "encoder":
        add_encoder(rng, table)
    elif kind == "extra tokens":
        add_extra_tokens(rng, table)
    elif kind == "adapter":
        add_adapter(rng, table)
    if (kind in ("whole", "adapter") or rng.random() < 0.03) and rng.random() < PREFERENCES_SHARE:
        prefer(rng, table)
    elif kind != "encoder" and table["layout"].get("schedule") != "pipedream" and rng.random() < STREAM_SHARE:
        _stream(rng, table["data"])


def _stream(rng: Random, data: Table) -> None:
    data |= {"stream": True, "virtual_shards": rng.choice((2, 3, 4)), "shuffle_buffer": rng.choice((1, 3, 4))}
    if rng.random() < 0.95:  # otherwise some are refused
        data |= {"format": "text", "packing": "concatenate"}
        data.pop("weights", None)


def _stages(layout: Table, accumulation: int) -> int:
    if layout["pp"] == 1:
        return 1
    numbers = layout["schedule"], layout["pp"], accumulation, layout.get("virtual_stages")
    if not _runs(*numbers):
        return int(layout["pp"])
    made = unchecked_table(*numbers)
    return made.stages // made.parameter_copies


def _batch(rng: Random, layout: Table, accumulation: int, *, routes: bool) -> Table:
    cp, tp = layout["cp"], layout["tp"]
    unit = lcm(2 * cp if cp > 1 else 1, cp * tp if routes or layout.get("sp", True) else cp)
    micro_batch = rng.choice((1, 1, 1, 2, 3))
    data_parallel = layout["dp_replicate"] * layout["dp_shard"]
    return {
        "sequence_length": unit * -(-rng.randint(9, 24) // unit),
        "global_batch": micro_batch * data_parallel * accumulation,
        "micro_batch": micro_batch,
    }


def _training(rng: Random, layout: Table, sequence: int) -> Table:
    """Everything that is neither shape nor layout nor memory."""
    ranks = prod(layout[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    stale = layout.get("schedule") == "pipedream"
    # A stage's first update shows in its forward up to pp steps later; then the pipeline empties and fills again.
    steps, evaluate = (2 * layout["pp"] + 1, layout["pp"] + 1) if stale else (3, rng.choice((0, 2, 3)))
    compute = rng.choice(("fp32", "fp32", "fp32", "tf32", "bf16", "bf16", "fp16"))
    narrow = compute in ("bf16", "fp16") and rng.random() < 0.25
    optimizer = rng.choice(("adamw", "adamw", "sgd", "lion", "adafactor", "muon"))
    states = rng.choice(("fp32", "fp32", "fp32", "bf16", "int8"))
    return {
        "precision": {
            "compute": compute,
            "gradients": "bf16" if narrow else "fp32",
            "optimizer_states": "fp32" if optimizer == "adafactor" and rng.random() < 0.8 else states,
        },
        "optimizer": {
            "name": optimizer,
            "lr": 1e-3,
            "eps": 1e-3,
            "betas": rng.choice(([0.9, 0.95], [0.9, 0.99], [0.0, 0.5])),
            "momentum": rng.choice((0.95, 0.95, 0.0)),
            "weight_decay": rng.choice((0.1, 0.0)),
            "clip": rng.choice((2.0, 0.05, 100.0, 0.0)),
        },
        "schedule": {
            "name": rng.choice(("cosine", "wsd", "constant")),
            "warmup_steps": rng.choice((0, 1, 2)),
            "decay_steps": rng.choice((0, 1)),
            "min_lr_ratio": rng.choice((0.1, 0.0)),
        },
        "data": _sources(rng)
        | {
            "packing": rng.choice(("concatenate", "concatenate", "concatenate", "best-fit", "none")),
            "mask_documents": rng.random() < 0.6,
            "workers": rng.choice((1, 2)) if ranks <= 4 and rng.random() < 0.2 else 0,
            "prefetch": rng.choice((1, 4)),
        },
        # All held-out sequences, which may be nearly as many as tokens: one process has them in larger batches.
        "evaluation": {"every_steps": evaluate, "batches": HELD_OUT * sequence, "sample_tokens": 0},
        "run": {
            "steps": steps,
            "seed": rng.randrange(1000),
            "device": "cpu",
            "compile": ranks <= MOST_COMPILED_RANKS and rng.random() < COMPILED_SHARE,
            "on_bad_step": rng.choice(("stop", "skip", "keep")),
        },
    }


def _sources(rng: Random) -> Table:
    """One text or a blend of two, and whether all of it counts in the loss."""
    format_ = rng.choice(("text", "text", "text", "conversations"))
    if rng.random() < 0.8:
        return {"sources": ["builtin:synthetic"], "format": format_}
    return {"sources": ["builtin:synthetic"] * 2, "weights": rng.choice(([1.0, 3.0], [0.0, 1.0])), "format": format_}


def _memory(rng: Random, table: Table) -> Table:
    stale = table["layout"].get("schedule") == "pipedream"
    kinds = ["none"] * 5 + ["selective", "full", "every", "budget"]
    recompute: Any = "none" if stale and rng.random() < 0.8 else rng.choice(kinds)
    share, blocks = rng.random(), rng.choice((2, 3))
    if recompute == "every":
        recompute = {"segments" if share < 0.7 else "every": blocks}
    if recompute == "budget":
        recompute = _budget(table, share)
    memory: Table = {"recompute": recompute}
    if not stale and rng.random() < 0.15:
        kept_on_device = rng.random() < 0.8 and _excludes_offload(table)  # otherwise it is refused
        some = (["optimizer"], ["params"], ["activations"], ["params", "activations"])
        memory["offload"] = ["activations"] if kept_on_device else rng.choice(some)
    return memory


def _excludes_offload(table: Table) -> bool:
    """Whether gradients in 16 bits, compressed ones, or quantised weights stay on the device."""
    base = table["model"].get("adapter", {}).get("base", "compute")
    return table["precision"]["gradients"] == "bf16" or "compress" in table["layout"] or base != "compute"


def _budget(table: Table, share: float) -> Any:
    """Room for some of the blocks' activations in the check's format: from all of them recomputed to none."""
    try:
        job = job_of_table(table | {"precision": {}}, "")
        require_layout(job, ranks_of(job.layout))
    except UserError:
        return "full"  # it is refused in any case
    least, most = budget_span(job, table_of(job) if job.layout.pp > 1 else None)
    return {"budget_gib": (least + share * (most - least) + 1) / 2**30}


def _prime_factors(number: int) -> list[int]:
    least = next((divisor for divisor in range(2, number + 1) if number % divisor == 0), None)
    return [] if least is None else [least, *_prime_factors(number // least)]
