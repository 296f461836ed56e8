"""The largest model, sequence or batch that fits a cluster: by bisection, confirmed by searches."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from meshwright.cost import parameter_count
from meshwright.errors import UserError
from meshwright.job import Job, Model, model_preset, model_presets
from meshwright.plan.economy import economy
from meshwright.plan.explain import batch_sequences, why_not
from meshwright.plan.grow import grown, grown_how
from meshwright.plan.question import Found, Question
from meshwright.plan.search import anything_fits, search

Kind = Literal["model", "sequence", "batch"]
KINDS: tuple[Kind, ...] = ("model", "sequence", "batch")
_EIGHTHS = tuple(2**octave * eighth // 8 for octave in range(3, 31) for eighth in range(8, 16))
"""Eight sizes in every doubling."""
_SHORTEST, _LONGEST = 128, 2**24
_MOST_EACH = 2**16
"""Sequences on a GPU."""
_NEAR = 4.0
"""Presets up to so many times the largest model are tried."""
_PRESETS = 3


@dataclass(frozen=True)
class Within:
    """What a training may take; None is not limited."""

    tokens: float | None = None
    days: float | None = None
    budget: float | None = None
    price: float | None = None

    def __bool__(self) -> bool:
        return self.days is not None or self.budget is not None

    def over(self, found: Found) -> str:
        """Why the fastest layout is too slow or too dear; empty if it is neither."""
        if not self or self.tokens is None:
            return ""
        best, machines = found.search.best[0], found.question.machines
        whole = economy(best.job, best.prediction, machines, self.tokens, self.price)
        if self.days is not None and whole.days > self.days:
            return f"takes {whole.days:,.1f} days"
        if self.budget is not None and (whole.cost is None or whole.cost > self.budget):
            return f"costs {whole.cost:,.0f}" if whole.cost is not None else "has no price"
        return ""


@dataclass(frozen=True)
class Largest:
    """The answer: the largest size that fits, with its layouts."""

    kind: Kind
    size: int
    """Parameters, tokens of a sequence, or sequences of a step."""
    found: Found
    """The layouts at this size, fastest first."""
    meaning: str
    """What was enlarged, and what stayed."""
    next_size: int | None
    """The smallest size that was tried and does not fit; None if the largest of all tried sizes fits."""
    next_why: str
    tried: tuple[tuple[int, bool], ...]
    """Sizes and whether they fit, in the order of the search."""
    presets: tuple[tuple[str, int], ...] = ()
    """Of a model: the largest known presets that fit, and their parameters, largest first."""


def in_parameters(number: float) -> str:
    """A number of parameters as people write it: 124M, 70.6B."""
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (0.0, "M")) if number >= 0.9995 * unit)
    return f"{number / (unit or 1e6):.3g}{name}"


class _Probe:
    """Whether a question has an answer."""

    def __init__(
        self, allow: Collection[str], within: Within, stop: Callable[[], None], *, at_once: bool = False
    ) -> None:
        self._allow, self._within, self._stop, self._at_once = allow, within, stop, at_once

    def likely(self, asked: Question) -> bool:
        """Whether one of the smallest layouts fits and, where the time of the training counts, the fastest is in it."""
        self._stop()
        if not anything_fits(asked.job, asked.machines, self._allow, at_once=self._at_once):
            return False
        return not self._within or not self.why(asked)

    def why(self, asked: Question) -> str:
        """Empty if a search finds a layout, else why it does not."""
        self._stop()
        try:
            found = self.fastest(asked, 1, lambda: not self._within)
        except UserError as error:
            return str(error)
        if not found.search.best:
            misses = found.search.misses
            return why_not(misses[0], found.search) if misses else "no layout fits"
        return self._within.over(found)

    def fastest(self, asked: Question, top: int, enough: Callable[[], bool] = lambda: False) -> Found:
        """The layouts of a search."""
        found = search(asked.job, asked.machines, top, self._allow, enough, at_once=self._at_once)
        return Found(asked, found)


def largest(
    kind: Kind,
    ask: Callable[[Model | None], Question],
    allow: Collection[str] = (),
    within: Within | None = None,
    top: int = 3,
    stop: Callable[[], None] = lambda: None,
) -> Largest | None:
    """The largest size that fits, or None if not even the smallest does.

    `ask` gives the question for another model, and for None as it is. `stop` is called before every search and may
    raise, if nobody waits any more.
    """
    probe = _Probe(allow, within or Within(), stop, at_once=kind == "batch")
    asked = ask(None)
    if kind == "model":
        return _largest_model(ask, asked, probe, top)
    if kind == "sequence":
        sizes = [size for size in _EIGHTHS if _SHORTEST <= size <= _LONGEST]
        changed = _with_sequence
        meaning = (
            f"the longest sequence with about {asked.job.tokens_per_step:,} tokens per step, at least one sequence; "
            "the model's positions are taken to reach so far"
        )
    else:
        sizes = _batches(asked.machines.nodes * asked.machines.gpus_per_node)
        changed = _with_batch
        meaning = (
            "the most sequences that all GPUs compute at once; memory does not limit the batch of a step, which may "
            "have any number of them one after the other (accumulation)"
        )
    return _bisected(kind, [(size, partial(changed, asked, size)) for size in sizes], probe, top, meaning)


def _bisected(
    kind: Kind, sizes: Sequence[tuple[int, Callable[[], Question]]], probe: _Probe, top: int, meaning: str
) -> Largest | None:
    """The last of ascending sizes that fits: halved by what is likely, then confirmed by searches at the answer and at
    the next size; if that fits after all, the larger sizes are halved by searches."""
    tried: dict[int, bool] = {}

    def halved(low: int, high: int, fits: Callable[[Question], bool]) -> tuple[int, int]:
        while high - low > 1:
            middle = (low + high) // 2
            tried[middle] = fits(sizes[middle][1]())
            low, high = (middle, high) if tried[middle] else (low, middle)
        return low, high

    low, high = halved(-1, len(sizes), probe.likely)
    why = probe.why(sizes[high][1]()) if high < len(sizes) else ""
    if high < len(sizes) and not why:
        tried[high] = True
        low, high = halved(high, len(sizes), lambda asked: not probe.why(asked))
        why = probe.why(sizes[high][1]()) if high < len(sizes) else ""
    if low < 0:
        return None
    size, asked = sizes[low]
    above = sizes[high][0] if high < len(sizes) else None
    steps = tuple((sizes[place][0], fits) for place, fits in tried.items())
    return Largest(kind, size, probe.fastest(asked(), top), meaning, above, why, steps)


def _largest_model(ask: Callable[[Model | None], Question], asked: Question, probe: _Probe, top: int) -> Largest | None:
    own = asked.job.model
    models = {parameter_count(model): model for model in grown(own)}
    sizes = [(size, partial(ask, models[size])) for size in sorted(models)]
    found = _bisected("model", sizes, probe, top, grown_how(own))
    return found and replace(found, presets=_presets(found.size, ask, own, probe))


def _presets(
    size: int, ask: Callable[[Model | None], Question], own: Model, probe: _Probe
) -> tuple[tuple[str, int], ...]:
    """The largest presets that fit; those of other shapes may, though they are larger, or not, though they are
    smaller."""
    known = {name: Model.model_validate({**model_preset(name), "preset": name}) for name in model_presets()}
    counts = {name: parameter_count(model) for name, model in known.items()}
    near = sorted((name for name in known if counts[name] <= _NEAR * size), key=lambda name: -counts[name])
    fitting: list[tuple[str, int]] = []
    for name in near:
        model = known[name]
        reach = max(model.max_sequence_length, own.max_sequence_length)
        if not probe.why(ask(model.model_copy(update={"max_sequence_length": reach}))):
            fitting.append((name, counts[name]))
        if len(fitting) == _PRESETS:
            break
    return tuple(fitting)


def _with_sequence(asked: Question, size: int) -> Question:
    job = asked.job
    model = job.model.model_copy(update={"max_sequence_length": max(size, job.model.max_sequence_length)})
    gpus = asked.machines.nodes * asked.machines.gpus_per_node
    batch, _ = batch_sequences(model, size, gpus, max(size, job.tokens_per_step))
    sizes = {"sequence_length": size, "global_batch": batch}
    return replace(asked, job=_resized(job, sizes).model_copy(update={"model": model}))


def _with_batch(asked: Question, size: int) -> Question:
    return replace(asked, job=_resized(asked.job, {"global_batch": size}))


def _resized(job: Job, sizes: dict[str, int]) -> Job:
    return job.model_copy(update={"batch": job.batch.model_copy(update=sizes)})


def _batches(gpus: int) -> list[int]:
    """Sequences that some of the GPUs, and then all of them, have equally many of."""
    some = [ranks for ranks in range(1, gpus) if gpus % ranks == 0]
    each = [*range(1, 8), *(size for size in _EIGHTHS if size <= _MOST_EACH)]
    return [*some, *(gpus * size for size in each)]
