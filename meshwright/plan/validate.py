"""Predictions against published measurements: errors by source, regret of choices, and what was left out and why."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshwright.errors import UserError
from meshwright.plan.coverage import coverage
from meshwright.plan.explain import layout_words, limit
from meshwright.plan.predict import Prediction, own_software, predict
from meshwright.plan.rows import Case, case_of, read_rows
from meshwright.plan.wording import Unpredicted


@dataclass(frozen=True)
class Outcome:
    """A case with what was predicted for it."""

    case: Case
    step_s: float
    memory_bytes: float
    fits: bool
    limit: str
    """What the step spends most on besides its products and attention."""

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, minus one."""
        return self.step_s / self.case.step_s - 1 if self.case.step_s else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured, minus one."""
        return self.memory_bytes / self.case.memory_bytes - 1 if self.case.memory_bytes else None


@dataclass(frozen=True)
class Validation:
    """All outcomes, and the rows without one."""

    outcomes: tuple[Outcome, ...]
    unpredicted: tuple[tuple[str, str, str], ...]
    """Id, source and reason."""

    def summary(self) -> dict[str, Any]:
        """The figures of `--json`; rows of our own trainer and of GPUs whose rates are guessed are counted apart."""
        known = [outcome for outcome in self.outcomes if not outcome.case.use]
        sources = dict.fromkeys([*(o.case.source for o in known), *(source for _, source, _ in self.unpredicted)])
        by_source = {
            source: _figures(
                [outcome for outcome in known if outcome.case.source == source],
                sum(other == source for _, other, _ in self.unpredicted),
            )
            for source in sources
        }
        kinds = dict.fromkeys(outcome.case.memory_kind for outcome in known if outcome.case.memory_bytes)
        own = [outcome for outcome in self.outcomes if outcome.case.use == "own"]
        uses = dict.fromkeys(outcome.case.use for outcome in self.outcomes if outcome.case.use not in ("", "own"))
        mixtures = [outcome for outcome in known if outcome.case.job.model.experts]
        plain = [outcome for outcome in known if not outcome.case.job.model.experts]
        both = {"without experts": _figures(plain, 0), "mixtures": _figures(mixtures, 0)} if mixtures and plain else {}
        return {
            "overall": _figures(known, len(self.unpredicted)),
            "models": both,
            "sources": by_source,
            "memory_kinds": {kind: _memory_figures([o for o in known if o.case.memory_kind == kind]) for kind in kinds},
            "guessed": {use: _figures([o for o in self.outcomes if o.case.use == use], 0) for use in uses},
            "own": _figures(own, 0),
            "coverage": coverage(self.outcomes),
            "axes": {axis: _by(known if axis in _OF_MIXTURES else plain or known, key) for axis, key in _AXES.items()},
            "refused": _refused(known),
            "worst": [_worst(outcome) for outcome in sorted(_timed(known), key=_size, reverse=True)[:_WORST]],
            "groups": _groups(known),
            "unpredicted": [{"id": row, "reason": reason} for row, _, reason in self.unpredicted],
            "rows": [_row(outcome) for outcome in self.outcomes],
        }


def validate(paths: Iterable[Path]) -> Validation:
    """Predict every row of the files."""
    outcomes: list[Outcome] = []
    unpredicted: list[tuple[str, str, str]] = []
    for path in paths:
        kind, rows = read_rows(path)
        for row in rows:
            try:
                case = case_of(kind, row)
                as_now = case.software == own_software(case.job)
                prediction = predict(case.job, case.cluster, None if as_now else case.software)
            except (Unpredicted, UserError) as reason:
                separator = ":" if kind == "sweep" else "-"
                unpredicted.append((row["id"], row["id"].rpartition(separator)[0], str(reason)))
                continue
            memory = _memory(case, prediction)
            outcomes.append(Outcome(case, prediction.step_s, memory, prediction.fits, limit(prediction)))
    return Validation(tuple(outcomes), tuple(unpredicted))


def _memory(case: Case, prediction: Prediction) -> float:
    """The figure that a case's measurement refers to: which rank, and how it was counted."""
    rank = prediction.memory[-1] if case.memory_of_last_rank else prediction.fullest
    if case.memory_kind == "steady_allocated_end_of_step":
        passing = ("activations", "a block's forward recomputed", "a block's backward", "logits and loss")
        return sum(size for name, size in rank.terms.items() if name not in passing)
    return {"allocated": rank.allocated, "reserved": rank.reserved, "device": rank.device}[case.memory_counted]


def _figures(outcomes: Sequence[Outcome], left_out: int) -> dict[str, Any]:
    times = [error for outcome in outcomes if (error := outcome.time_error) is not None]
    memories = [abs(error) for outcome in outcomes if (error := outcome.memory_error) is not None]
    groups = _groups(outcomes)
    regrets = [group["regret"] for group in groups]
    refused = [outcome for outcome in outcomes if not outcome.fits and outcome.case.ran is not None]
    died = [outcome for outcome in outcomes if outcome.case.ran is False]
    right = sum(outcome.case.ran is False for outcome in refused)
    return {
        "count": len(outcomes) + left_out,
        "predicted": len(outcomes),
        "median_abs_time_error": median(map(abs, times)) if times else None,
        "mean_abs_time_error": mean(map(abs, times)) if times else None,
        "time_bias": mean(times) if times else None,
        "median_abs_memory_error": median(memories) if memories else None,
        "oom_precision": right / len(refused) if refused else None,
        "oom_recall": right / len(died) if died else None,
        "groups": len(groups),
        "mean_regret": mean(regrets) if regrets else None,
        "max_regret": max(regrets) if regrets else None,
        "top1_rate": mean(regret == 0 for regret in regrets) if regrets else None,
    }


_SCALES = (8, 64, 512)
_WORST = 20


def _scale(outcome: Outcome) -> str:
    gpus = outcome.case.cluster.nodes * outcome.case.cluster.gpus_per_node
    below = next((most for most in _SCALES if gpus <= most), None)
    return f"to {below}" if below else f"over {_SCALES[-1]}"


_AXES: dict[str, Callable[[Outcome], Any]] = {
    "tp": lambda outcome: outcome.case.job.layout.tp,
    "cp": lambda outcome: outcome.case.job.layout.cp,
    "pp": lambda outcome: outcome.case.job.layout.pp,
    "ep": lambda outcome: outcome.case.job.layout.ep,
    "experts": lambda outcome: "a mixture" if outcome.case.job.model.experts else "none",
    "zero": lambda outcome: outcome.case.job.layout.zero_stage,
    "GPUs": _scale,
    "GPU": lambda outcome: outcome.case.cluster.gpu,
    "program": lambda outcome: outcome.case.software.name,
}
"""By what errors are told apart."""
_OF_MIXTURES = ("ep", "experts")
"""By these mixtures are, by the others models without experts, where there are both."""


def _timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.time_error is not None]


def _size(outcome: Outcome) -> float:
    return abs(outcome.time_error or 0.0)


def _by(outcomes: Iterable[Outcome], key: Callable[[Outcome], Any]) -> dict[str, dict[str, Any]]:
    """Errors of time for every value of an axis, with their sign."""
    members: dict[Any, list[float]] = defaultdict(list)
    for outcome in _timed(outcomes):
        members[key(outcome)].append(outcome.time_error or 0.0)
    order = sorted(members) if all(isinstance(value, int) for value in members) else sorted(members, key=_place)
    return {
        str(value): {
            "rows": len(members[value]),
            "median_abs_time_error": median(map(abs, members[value])),
            "mean_abs_time_error": mean(map(abs, members[value])),
            "time_bias": mean(members[value]),
        }
        for value in order
    }


def _place(word: str) -> tuple[bool, int, str]:
    """Sizes in their order, words by the alphabet."""
    last = word.rpartition(" ")[2]
    return word.startswith("over"), int(last) if last.isdigit() else 0, word


def _stated(outcome: Outcome) -> bool:
    """Whether a row says its micro-batch and recomputation, without which its memory is a guess."""
    return not any(
        what.startswith(("micro-batch", "no recomputation", "recomputation")) for what in outcome.case.assumed
    )


def _refused(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Runs that ran and are called impossible, of all and of those that say what their memory depends on."""
    ran = [outcome for outcome in outcomes if outcome.case.ran]
    stated = [outcome for outcome in ran if _stated(outcome)]
    return {
        name: {"rows": len(some), "refused": [outcome.case.id for outcome in some if not outcome.fits]}
        for name, some in (("all", ran), ("stated", stated))
    }


def _worst(outcome: Outcome) -> dict[str, Any]:
    """A row with what its prediction is made of and what it had to assume: where to look for the error."""
    case = outcome.case
    return {
        "id": case.id,
        "error": outcome.time_error,
        "gpus": f"{case.cluster.nodes * case.cluster.gpus_per_node} × {case.cluster.gpu}",
        "layout": layout_words(case.job),
        "limit": outcome.limit,
        "assumed": list(case.assumed),
    }


def _memory_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    errors = [error for outcome in outcomes if (error := outcome.memory_error) is not None]
    return {
        "predicted": len(errors),
        "median_abs_memory_error": median(map(abs, errors)),
        "memory_bias": mean(errors),
    }


def _groups(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Layouts of the same job: what choosing the fastest predicted one costs over the fastest measured one; a layout
    that was measured several times, as with versions of a program, took the median."""
    members: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.case.group is not None and outcome.case.step_s:
            members[outcome.case.group].append(outcome)
    groups = []
    for name, rows in members.items():
        by_layout: dict[str, list[Outcome]] = defaultdict(list)
        for row in rows:
            by_layout[layout_words(row.case.job)].append(row)
        if len(by_layout) < 2:
            continue
        took = {layout: median(row.case.step_s or 0.0 for row in same) for layout, same in by_layout.items()}
        chosen = min(rows, key=lambda row: row.step_s)
        best = min(rows, key=lambda row: took[layout_words(row.case.job)])
        regret = took[layout_words(chosen.case.job)] / took[layout_words(best.case.job)] - 1
        groups.append(
            {"group": name, "rows": len(rows), "chosen": chosen.case.id, "best": best.case.id, "regret": regret}
        )
    return groups


def _row(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    timed = case.step_s is not None
    return {
        "id": case.id,
        "predicted": outcome.step_s if timed else outcome.memory_bytes,
        "measured": case.step_s if timed else case.memory_bytes,
        "unit": "s" if timed else "bytes",
        "predicted_memory_bytes": outcome.memory_bytes,
        "measured_memory_bytes": case.memory_bytes,
        "fits": outcome.fits,
        "assumed": list(case.assumed),
        "software": case.software.name,
        "gpu": case.cluster.gpu,
        "gpus": case.cluster.nodes * case.cluster.gpus_per_node,
        "layout": layout_words(case.job),
        "use": case.use,
    }
