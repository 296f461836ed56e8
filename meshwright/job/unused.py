"""Warn about fields that a job sets but nothing reads, since someone expects an effect."""

from collections.abc import Callable, Iterable

from meshwright.job.job import Job
from meshwright.registries import OPTIMIZERS, SCHEDULES


class JobWarning(UserWarning):
    """Something that the author of a job should know."""


class UnusedFieldWarning(JobWarning):
    """A field of a job that has no effect given the others."""


def _optimizer_in(*names: str) -> Callable[[Job], bool]:
    """Whether a job's optimizer is one of these, or one of the user's own, which may read anything."""
    return lambda job: job.optimizer.name in names or job.optimizer.name not in OPTIMIZERS.built_in


_READERS: list[tuple[str, str, Callable[[Job], bool]]] = [
    ("model.rope_theta model.rope_scaling", 'model.positions = "rope"', lambda job: job.model.positions == "rope"),
    ("model.qk_norm_over", "model.qk_norm = true", lambda job: job.model.qk_norm),
    ("model.window_layers", "model.sliding_window", lambda job: job.model.sliding_window is not None),
    (
        "model.init_std model.embed_std",
        "random weights: no model.init_from, or an encoder without one",
        lambda job: job.model.init_from is None or job.model.encoder is not None,
    ),
    ("model.extra_tokens_weight", "model.extra_tokens", lambda job: job.model.extra_tokens > 0),
    ("data.virtual_shards data.shuffle_buffer", "data.stream = true", lambda job: job.data.stream),
    (
        "data.chat_template",
        'data.format = "conversations" or "preferences"',
        lambda job: job.data.format != "text",
    ),
    (
        "data.items_per_sequence data.oversize data.check data.damaged data.decode data.encoder",
        "data.fields",
        lambda job: bool(job.data.fields),
    ),
    (
        "preference.loss preference.beta preference.label_smoothing",
        'data.format = "preferences"',
        lambda job: job.data.format == "preferences",
    ),
    ("layout.sp layout.kv_replicate", "layout.tp above 1", lambda job: job.layout.tp > 1),
    ("layout.cp_method", "layout.cp above 1", lambda job: job.layout.cp > 1),
    ("layout.schedule layout.virtual_stages layout.split", "layout.pp above 1", lambda job: job.layout.pp > 1),
    (
        "layout.order",
        "layout.pp and data parallelism above 1",
        lambda job: job.layout.pp > 1 and job.data_parallel > 1,
    ),
    ("layout.compress_ratio", 'layout.compress = "topk"', lambda job: job.layout.compress == "topk"),
    ("layout.compress_rank", 'layout.compress = "powersgd"', lambda job: job.layout.compress == "powersgd"),
    (
        "layout.compress_after layout.bucket_mb",
        'layout.compress other than "none"',
        lambda job: job.layout.compress != "none",
    ),
    (
        "layout.prefetch",
        "layout.zero = 3 over several ranks",
        lambda job: job.layout.zero_stage == 3 and job.layout.shares_states,
    ),
    (
        "precision.fp8_scales precision.fp8_head",
        'precision.compute = "fp8"',
        lambda job: job.precision.format == "fp8",
    ),
    (
        "precision.fp8_gather",
        'precision.compute = "fp8" where ranks share states (layout.zero above 0, dp_shard · cp above 1)',
        lambda job: job.precision.format == "fp8" and job.layout.shares_states,
    ),
    (
        "optimizer.momentum",
        'optimizer.name = "sgd" or "muon"',
        _optimizer_in("sgd", "muon"),
    ),
    ("optimizer.adamw_lr", 'optimizer.name = "muon"', lambda job: job.optimizer.name == "muon"),
    (
        "optimizer.betas",
        'optimizer.name = "adamw", "lion" or "muon"',
        _optimizer_in("adamw", "lion", "muon"),
    ),
    (
        "optimizer.eps",
        'optimizer.name = "adamw", "adafactor" or "muon"',
        _optimizer_in("adamw", "adafactor", "muon"),
    ),
    ("optimizer.settings", "an optimizer of your own", _optimizer_in()),
    ("schedule.settings", "a schedule of your own", lambda job: job.schedule.name not in SCHEDULES.built_in),
    (
        "schedule.decay_steps",
        'schedule.name = "wsd"',
        lambda job: job.schedule.name == "wsd" or job.schedule.name not in SCHEDULES.built_in,
    ),
    ("schedule.min_lr_ratio", 'schedule.name = "cosine" or "wsd"', lambda job: job.schedule.name != "constant"),
    ("run.may_shrink", "run.max_restarts above 0", lambda job: job.run.max_restarts > 0),
]
READERS = {field: (words, reads) for fields, words, reads in _READERS for field in fields.split()}
"""Fields that only some jobs read: the condition in words, and as a function. Fields turned off on purpose
(evaluation.every_steps = 0, data.workers = 0) are not listed."""


def unused_fields(job: Job, given: Iterable[str]) -> list[str]:
    """A sentence for each given field that has no effect in this job, unless it has its default value."""
    sentences = []
    for field in given:
        words, reads = READERS.get(field, ("", lambda job: True))
        if not reads(job) and (value := _value(job, field)) != _value(Job(), field):
            sentences.append(f"{field} = {value} has no effect: it is read only with {words}")
    return sentences


def _value(job: Job, field: str) -> object:
    section, name = field.split(".")
    return getattr(getattr(job, section), name)
