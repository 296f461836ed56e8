"""What a check of the run itself runs: a small job for `train`, and the layouts it is resumed in."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import lcm
from typing import Any

from pydantic import ValidationError

from meshwright.data import SHAPES
from meshwright.data.own_sources import is_own_source
from meshwright.data.tokenizer import SMALLEST_VOCABULARY
from meshwright.errors import UserError
from meshwright.job import FORMAT_BYTES, Job
from meshwright.job.devices import Layout, Memory
from meshwright.layout import is_asynchronous, ranks_of, require_layout
from meshwright.verify.compressed import LOSSLESS, is_lossy
from meshwright.verify.run_pictures import pictures_for
from meshwright.verify.run_text import data_for, form_of, is_prepared_data
from meshwright.verify.shrink import Change, shrink

STEPS = 8
FEWEST_STEPS = 4
MOST_SETS = 2
UNWATCHED = {"max_restarts": 0, "may_shrink": False, "watchdog_s": 0.0, "on_bad_step": "keep"}
"""Settings that keep a run alive would only hide that it failed."""
FEWEST_SEQUENCES = 8
"""Of a step: enough for other layouts to share, and for text that ends within a step."""


@dataclass(frozen=True)
class Leg:
    """One leg of the run: a layout, and the step of the checkpoint it resumes from."""

    job: Job
    start: int

    @property
    def name(self) -> str:
        """The layout in words."""
        return layout_name(self.job.layout)


def small_run(job: Job, steps: int = STEPS) -> tuple[Job, list[Change]]:
    """The job at CPU size as `train` would run it, with its own kind of data, and each change."""
    small, changes = shrink(job, steps)
    own = {"data": job.data, "evaluation": job.evaluation}
    made, more = as_run(small.model_copy(update=own), steps, is_prepared_data(job.data))
    # A run reads from disk what `shrink` puts in memory in place of the job's text.
    kept = [change for change in changes if not change.text.startswith(("text:", "pictures:", "data.", "evaluation."))]
    formats = {"compute": job.precision.format, "gradients": job.precision.gradients}
    narrow = [f'precision.{name} "{own}"' for name, own in formats.items() if FORMAT_BYTES[own] < FORMAT_BYTES["fp32"]]
    report = "the format of the check; without --run it is checked in its own"
    return made, kept + [Change(f"{own} → {report}", hides=True) for own in narrow] + more


def as_run(job: Job, steps: int = STEPS, prepared: bool = False) -> tuple[Job, list[Change]]:
    """A small job with what a run needs besides its layout (text, evaluations, checkpoints), and what that changes."""
    if steps < FEWEST_STEPS:
        raise UserError(
            f"--steps {steps} is too few to resume in another layout, in one process and in the first layout again; "
            f"give at least {FEWEST_STEPS}"
        )
    if is_asynchronous(job):
        raise UserError(
            'layout.schedule = "pipedream" computes with stale weights, which a run in one process does not; verify it '
            "without --run"
        )
    if job.model.audio is not None:
        raise UserError("model.audio needs sound, and --run writes text and pictures; verify it without --run")
    data, notes = data_for(job.data)
    if job.model.vision is not None:
        data, more = pictures_for(data, job.model.vision)
        notes += more
    if is_lossy(job.layout):
        was = f'layout.compress "{job.layout.compress}"'
        notes.append(Change(f'{was} → "topk" with compress_ratio 1.0, which loses nothing', hides=True))
    sets = dict(islice(job.evaluation.sets.items(), MOST_SETS))
    changes: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": _vocabulary(job)},
        "batch": _batch(job),
        "layout": LOSSLESS if is_lossy(job.layout) else {},
        "precision": {"compute": "fp32", "gradients": "fp32"},
        "evaluation": {"batches": 1, "sample_tokens": 0, "sets": sets}
        | ({"every_steps": steps // 2} if job.evaluation.every_steps else {}),
        "checkpoint": {"every_steps": steps // 4, "keep_last": steps + 1},
        "run": {"steps": steps, "device": "cpu", "folder": None} | UNWATCHED,
    }
    sections = job.model_dump() | {"data": data.model_dump()}
    for section in ("checkpoint", "log"):
        sections.pop(section)
    for section, fields in changes.items():
        sections[section] = sections.get(section, {}) | fields
    made = Job.model_validate(sections)
    text = f"{form_of(data, prepared)} generated for this check, which end during the run"
    if SHAPES in data.sources:
        text = f"{SHAPES} as they are"
    if own := [name for name in data.sources if is_own_source(name)]:
        text = f"{', '.join(own)} as it is" + (f", else {text}" if len(own) < len(data.sources) else "")
    kind = f"text: {text}; tokens are bytes"
    sizes = f"{made.batch.global_batch} sequences a step, micro-batches of {made.batch.micro_batch}"
    notes.append(Change(f"{kind}, vocabulary {made.model.vocab_size}, {sizes}"))
    return made, notes


def _vocabulary(job: Job) -> int:
    """The least one for bytes that tp and 2 divide as they divide the job's."""
    size, unit = job.model.vocab_size, lcm(2, job.layout.tp)
    return size + max(0, -(-(SMALLEST_VOCABULARY - size) // unit)) * unit


def _batch(job: Job) -> dict[str, int]:
    """Larger micro-batches, as many of them."""
    times = -(-FEWEST_SEQUENCES // job.batch.global_batch)
    return {
        "micro_batch": job.batch.micro_batch * times,
        "global_batch": job.batch.global_batch * times,
    }


def legs_of(job: Job) -> list[Leg]:
    """The job's layout, and after each checkpoint the next: another layout, one process, the job's own again."""
    saved = job.checkpoint.every_steps
    assert saved is not None
    jobs = (job, _in_layout(job, other_layout(job)), alone(job), job)
    return [Leg(each, number * saved) for number, each in enumerate(jobs)]


def alone(job: Job) -> Job:
    """The job in one process."""
    return _in_layout(job, Layout())


def other_layout(job: Job) -> Layout:
    """A layout that shards the model differently from the job's, of at most four ranks."""
    for layout in _candidates(job):
        if _fits(job, layout):
            return layout
    return Layout()


def _candidates(job: Job) -> Iterator[Layout]:
    now = job.layout
    tensor = {"tp": 2, "kv_replicate": job.model.kv_heads % 2 > 0, "sp": job.batch.sequence_length % 2 == 0}
    if now.tp == 1:
        yield Layout(**tensor, dp_shard=2, zero=1) if now.dp_shard == 1 else Layout(**tensor)
    yield Layout(dp_shard=3 if now.dp_shard == 2 else 2, zero=3)
    yield Layout(dp_shard=4 if now.dp_shard == 2 else 2, zero=3)
    if now.pp == 1:
        yield Layout(pp=2)
    yield Layout(dp_replicate=2)


def _fits(job: Job, layout: Layout) -> bool:
    try:
        require_layout(_in_layout(job, layout), ranks_of(layout))
    except (ValidationError, UserError):
        return False
    return True


def _in_layout(job: Job, layout: Layout) -> Job:
    """Micro-batches may be smaller there; memory savers and compiled blocks stay with the job's own layout."""
    ranks = layout.dp_replicate * layout.dp_shard
    own = job.batch.global_batch // ranks
    micro_batch = next(size for size in range(min(own, job.batch.micro_batch), 0, -1) if own % size == 0)
    changes = {"layout": layout.model_dump(), "memory": Memory().model_dump()}
    changes["batch"] = job.batch.model_dump() | {"micro_batch": micro_batch}
    changes["run"] = job.run.model_dump() | {"compile": False}
    return Job.model_validate(job.model_dump() | changes)


def layout_name(layout: Layout) -> str:
    """The degrees of a layout, as `tp 2 × dp_shard 2`."""
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    return " × ".join(degree for degree in degrees if not degree.endswith(" 1")) or "one process"
