"""The planning page's request, validated: a model, machines, a batch, and one of the layouts found."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.amounts import NoAmount, length, tokens
from meshwright.errors import UserError
from meshwright.studio.page_words import FieldError, label

if TYPE_CHECKING:
    from meshwright.job import Job, Model
    from meshwright.job.devices import Cluster
    from meshwright.plan import Question

SHAPE = (
    *("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "max_sequence_length"),
    *("norm", "activation", "positions", "qkv_bias", "linear_bias", "qk_norm", "sliding_window", "tied"),
    *("experts", "latent", "qk_norm_over", "window_layers", "sinks"),
)
"""Fields of a model that a plan depends on."""
LIMITS = {
    "nodes": (1, 2**12),
    "gpus": (1, 72),
    "seq": (16, 2**20),
    "batch": (16, 2**28),
    "vocab_size": (16, 2**20),
    "width": (16, 2**16),
    "layers": (1, 256),
    "heads": (1, 512),
    "kv_heads": (1, 512),
    "head_dim": (2, 1024),
    "ffn_width": (16, 2**18),
    "experts.count": (1, 2**12),
    "experts.top_k": (1, 2**8),
    "experts.ffn_width": (16, 2**18),
    "experts.shared_width": (0, 2**18),
    "max_sequence_length": (16, 2**24),
}
"""Minimum and maximum of every number; larger values are typos, or attempts to keep the planner busy."""
_WRITTEN = {"seq": length, "batch": tokens}
"""Numbers that the form takes as people write them."""
_SITE = {"pue": ("pue", 1.0, 10.0), "co2": ("co2_g_per_kwh", 0.0, 5000.0)}
"""Of the site's electricity: the cluster's field, and its least and largest value."""
_PICKED = ("layout", "memory", "precision", "run")


@dataclass(frozen=True)
class Asked:
    """One request to the planner."""

    model: "Model"
    cluster: "Cluster"
    sequence: int
    batch: int
    """Sequences per step."""
    practice: str
    """Where the batch comes from, if the request does not set it."""

    @property
    def gpus(self) -> int:
        """In total."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def question(self) -> "Question":
        """The same for the planner's other questions."""
        from meshwright.plan import Question

        return Question(self.job, self.cluster, self.practice, ())

    @property
    def job(self) -> "Job":
        """What is searched for: the model as it is usually trained, in 16 bits and compiled."""
        from meshwright.job import Job
        from meshwright.layout import resolve_for
        from meshwright.plan import usual_compute

        usual = Job.model_validate({"precision": {"compute": usual_compute(self.cluster)}})
        usual = resolve_for(usual, self.cluster)
        sizes = {"sequence_length": self.sequence, "global_batch": self.batch, "micro_batch": 1}
        batch = usual.batch.model_copy(update=sizes)  # which the search refuses if they do not go with the model
        return usual.model_copy(update={"model": self.model, "batch": batch})

    def picked(self, words: str) -> "Job":
        """The job with the layout that a row of the table names."""
        from pydantic import ValidationError

        from meshwright.job import Job

        try:
            settings = json.loads(words)
            micro_batch = settings.pop("micro_batch")
            sections = {name: settings.pop(name) for name in _PICKED if name in settings}
            if settings:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError("pick is not a layout from this page; choose a row of the table") from None
        batch = {"sequence_length": self.sequence, "global_batch": self.batch, "micro_batch": micro_batch}
        parts = {"model": self.model.model_dump(exclude_unset=True), "batch": batch, **sections}
        try:
            return Job.model_validate(parts)
        except ValidationError as error:
            raise UserError(f"pick is not a valid layout ({first_fault(error)}); choose another row") from None


def pick_of(job: "Job") -> str:
    """The text of a layout that `Asked.picked` accepts."""
    sections = {name: getattr(job, name).model_dump(mode="json", exclude_unset=True) for name in _PICKED}
    parts = {"micro_batch": job.batch.micro_batch, **{name: fields for name, fields in sections.items() if fields}}
    return json.dumps(parts, separators=(",", ":"))


def shape_of(model: "Model") -> dict[str, Any]:
    """A model's fields that a plan depends on, as the form has them; of its tables what differs from the defaults."""
    from pydantic import BaseModel

    values = ((name, getattr(model, name)) for name in SHAPE)
    return {
        name: value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else value
        for name, value in values
    }


def asked(state: dict[str, Any], cluster: "Cluster | None" = None, model: "Model | None" = None) -> Asked:
    """The request for a page's state, or for another cluster or model; a UserError names what is invalid."""
    from meshwright.plan import batch_sequences

    model, cluster = model or _model(state), cluster or _cluster(state)
    sequence = _number(state, "seq") or min(4096, model.max_sequence_length)
    gpus = cluster.nodes * cluster.gpus_per_node
    batch, practice = batch_sequences(model, sequence, gpus, _number(state, "batch"))
    return Asked(model, cluster, sequence, batch, practice)


def _model(state: dict[str, Any]) -> "Model":
    from pydantic import ValidationError

    from meshwright.job import Model, model_preset, preset_named, unknown_model

    given = state.get("shape") or {}
    if not isinstance(given, dict) or set(given) - set(SHAPE):
        raise UserError(f"shape has fields that no plan depends on; give some of {', '.join(SHAPE)}")
    experts = given.get("experts")
    flat = given | ({f"experts.{name}": value for name, value in experts.items()} if isinstance(experts, dict) else {})
    for name in LIMITS:
        _number(flat, name)
    start: dict[str, Any] = {}
    if name := str(state.get("model") or ""):
        preset = preset_named(name)
        if preset is None:
            raise FieldError("model", unknown_model(f'Preset = "{name[:60]}"', name, "upload the model's config.json"))
        start = {"preset": preset, **model_preset(preset)}
    try:
        return Model.model_validate(start | given)
    except ValidationError as error:
        raise UserError(first_fault(error)) from None


def _cluster(state: dict[str, Any]) -> "Cluster":
    from meshwright.job.devices import Cluster
    from meshwright.plan import parse_cluster

    nodes, gpus = _number(state, "nodes") or 1, _number(state, "gpus") or 8
    gpu = str(state.get("gpu") or "h100")
    try:
        known = parse_cluster(f"{nodes}x{gpus}x{gpu}")
    except UserError:
        raise FieldError("gpu", f"GPU = {gpu[:60]} is not known; choose one from the list") from None
    links = {}
    for name, key in (("node", "node_link"), ("network", "network_link")):
        rate = state.get(key)
        if rate is not None:
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e5:
                raise FieldError(key, f"{label(key)} = {rate} is not a rate; give GB/s above 0, or leave it empty")
            links[name] = float(rate)
    fields: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus, "gpu": known.gpu, **site_of(state)}
    return Cluster(**fields, **({"links": links} if links else {}))


def site_of(state: dict[str, Any]) -> dict[str, float]:
    """What the form says of the site's electricity, as fields of a cluster."""
    found = {}
    for name, (field, least, most) in _SITE.items():
        value = state.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise FieldError(name, f"{label(name)} = {str(value)[:40]} is not a number from {least:g} to {most:g}")
        found[field] = float(value)
    return found


def _number(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    least, most = LIMITS[name]
    if name in _WRITTEN and isinstance(value, str):
        text = value
        try:
            value = _WRITTEN[name](text)
        except NoAmount as error:
            raise FieldError(name, f"{label(name)} = {text[:40]} is not a number of tokens; {error}") from None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise FieldError(name, f"{label(name)} = {value} is not a whole number from {least:,} to {most:,}; correct it")
    return value


def first_fault(error: Any) -> str:
    """The first validation error, as one sentence."""
    report = error.errors()[0]
    place = ".".join(str(part) for part in report["loc"])
    words = str(report["msg"]).removeprefix("Value error, ")
    return f"{place}: {words}" if place else words
