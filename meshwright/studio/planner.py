"""Answers to the planning page: ranked layouts, the charts of one, a model from an uploaded config.

It runs in a separate process (`meshwright.studio.worker`), which keeps the planner's tables warm and leaves the
server free to answer while a search runs.
"""

import json
from collections.abc import Callable
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.studio.expectations import expectations
from meshwright.studio.numbers import count
from meshwright.studio.page_words import field_of, in_page_words
from meshwright.studio.plan_report import layout_pictures
from meshwright.studio.plan_request import Asked, asked, pick_of, shape_of
from meshwright.studio.questions import other_answer
from meshwright.studio.training import FIELDS, Training, training

if TYPE_CHECKING:
    from meshwright.job.devices import Cluster
    from meshwright.plan import Candidate, Search

QUICK_S = 0.12
"""Time of a first answer for bounds and predictions; the page then requests the full search with more rows."""
_MORE_S = 0.1
"""More time for a first answer if no layout fits yet."""
_TOP, _QUICK_TOP = 10, 3
_KEPT = 256
LONG_S = 60.0
"""CPU time of the longest answer: one request must not keep the planner from all others."""
_GIVES_UP = 2
GIB = 2**30


class _Interrupted(Exception):
    """Another request waits."""


class Planner:
    """Answers requests and caches the answers."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        self._interrupted = interrupted
        """Whether another request waits: then a long search returns what it has."""
        self._answers: dict[str, dict[str, Any]] = {}
        self._searches: dict[str, Search] = {}
        self._given_up: dict[str, int] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the page shows for a request, or `error`: one sentence on what is invalid."""
        parts = {"search": self._search, "layout": _layout, "config": _config, "run": _run, "question": self._question}
        key = json.dumps(question, sort_keys=True)
        for known in (key, json.dumps({**question, "full": True}, sort_keys=True)):
            if known in self._answers:
                return self._answers[known]
        begun = perf_counter()
        try:
            make = parts.get(str(question.get("part")))
            if make is None:
                raise UserError(f"part = {question.get('part')} is not known; give one of {', '.join(parts)}")
            found = make(question)
        except UserError as error:
            return {"error": in_page_words(str(error)), "field": field_of(error)}
        found["took_s"] = round(perf_counter() - begun, 4)
        if found.get("whole", True):
            _keep(self._answers, key, found)
        return found

    def _search(self, state: dict[str, Any]) -> dict[str, Any]:
        from meshwright.cost import active_parameters, parameter_count
        from meshwright.plan import why_not

        question, whole = asked(state), training(state)
        found, complete = self._found(question, state)
        best = found.best[0] if found.best else None
        return {
            "parameters": parameter_count(question.model),
            "parameters_words": count(parameter_count(question.model)),
            "active_words": count(active_parameters(question.model)) if question.model.experts else "",
            "shape": shape_of(question.model),
            "gpus": question.gpus,
            "sequence": question.sequence,
            "batch": question.batch,
            "batch_tokens": question.batch * question.sequence,
            "practice": question.practice,
            "bounded": found.bounded,
            "predicted": found.predicted,
            "whole": complete,
            "rows": _rows(found, whole, question.cluster),
            "training": whole.sentence(best, question.cluster),
            "misses": [in_page_words(why_not(one, found)) for one in found.misses],
            "nothing": _nothing(question, found, complete),
        }

    def _question(self, state: dict[str, Any]) -> dict[str, Any]:
        """One of the page's other questions. It ends early if another request waits, and is then asked again; not more
        than twice, or two pages would keep each other from an answer."""
        key, until = json.dumps(state, sort_keys=True), process_time() + LONG_S

        def stop() -> None:
            if process_time() > until:
                raise UserError("the answer takes too long for so many GPUs; ask for fewer, or the command line")
            if self._interrupted() and self._given_up.get(key, 0) < _GIVES_UP:
                raise _Interrupted

        try:
            return other_answer(state, _allowed(state), stop)
        except _Interrupted:
            _keep(self._given_up, key, self._given_up.get(key, 0) + 1)
            return {"whole": False, "interrupted": True}

    def _found(self, question: Asked, state: dict[str, Any]) -> tuple["Search", bool]:
        """The layouts, and whether the search was complete: then it is not repeated for another whole training."""
        from meshwright.plan import search

        full = bool(state.get("full"))
        key = json.dumps({name: state[name] for name in state if name not in (*FIELDS, "full")}, sort_keys=True)
        if key in self._searches:
            return self._searches[key], True
        until = process_time() + QUICK_S  # CPU time, so that a busy machine answers later but just as well
        found = search(
            question.job,
            question.cluster,
            top=_TOP if full else _QUICK_TOP,
            allow=_allowed(state),
            enough=self._interrupted if full else lambda: process_time() > until,
            give_up=self._interrupted if full else lambda: process_time() > until + _MORE_S,
        )
        complete = full and found.whole
        if complete:
            _keep(self._searches, key, found)
        return found, complete


def _keep(cache: dict[str, Any], key: str, value: Any) -> None:
    cache[key] = value
    if len(cache) > _KEPT:
        cache.pop(next(iter(cache)))


def _allowed(state: dict[str, Any]) -> list[str]:
    words = state.get("allow") or []
    if not isinstance(words, list):
        raise UserError("allow is not a list of words; give some of those on the page")
    return [str(word) for word in words]


def _nothing(question: Asked, found: "Search", hinted: bool) -> str:
    """That nothing fits, with the smallest change that would, if there is time to look for it; nothing before that is
    known."""
    from meshwright.plan import what_would_fit

    if found.best or not found.whole:
        return ""
    gpus = "one GPU" if question.gpus == 1 else f"{question.gpus} GPUs"
    hint = None
    if hinted:
        hint = what_would_fit(question.job, question.cluster)
    remedy = f"try {in_page_words(hint)}" if hint else "use more or larger ones, or a smaller model"
    return f"No layout fits on {gpus} of this kind; {remedy}."


def _rows(found: "Search", whole: Training, cluster: "Cluster") -> list[dict[str, Any]]:
    from meshwright.plan import tied

    ties = tied(found.best) if found.best else ()
    return [_row(one, whole, cluster, tie) for one, tie in zip(found.best, ties, strict=True)]


def _row(one: "Candidate", whole: Training, cluster: "Cluster", tie: bool) -> dict[str, Any]:
    from meshwright.plan import error_bars, layout_words, limit

    prediction = one.prediction
    bars = error_bars(one.job, cluster, prediction)
    return {
        "pick": pick_of(one.job),
        "layout": layout_words(one.job),
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "interval": list(bars.tokens_per_s_per_gpu),
        "gib_interval": [size / GIB for size in bars.device_bytes],
        "tie": tie,
        "mfu": prediction.mfu,
        "step_s": prediction.step_s,
        "gib": prediction.fullest.device / GIB,
        "share": prediction.fullest.device / prediction.capacity_bytes,
        "limited_by": limit(prediction),
        "training": whole.of(one, cluster),
    }


def _layout(state: dict[str, Any]) -> dict[str, Any]:
    from meshwright.plan import error_bars, job_text, layout_words, predict, spelled

    question = asked(state)
    job = question.picked(str(state.get("pick")))
    cluster = question.cluster
    prediction = predict(job, cluster)
    bars = error_bars(job, cluster, prediction)
    heading = (
        f"planned for {spelled(cluster)}: {layout_words(job)}; "
        f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s per {prediction.per}, "
        f"{prediction.fullest.device / GIB:.1f} GiB predicted"
    )
    return {
        "title": layout_words(job),
        "pictures": layout_pictures(job, cluster, prediction),
        "evidence": [f"80% intervals, time: {bars.evidence}", f"memory: {bars.memory_evidence}"],
        "profile": prediction.profile,
        "guessed": list(prediction.guessed),
        "job": job_text(job.model_copy(update={"cluster": cluster}), heading),
        "commands": commands(cluster),
    }


def commands(cluster: "Cluster") -> list[dict[str, str]]:
    """The next commands to run with a downloaded job.toml, which names no data."""
    gpus, data = cluster.gpus_per_node, """--set 'data.sources=["texts"]'"""
    train = f"meshwright train job.toml {data}" + (f" --nproc {gpus}" if gpus > 1 else "")
    submit = f"meshwright submit job.toml {data} --site leonardo"
    rehearse = {"run one rank of each kind on the GPU you have": "meshwright rehearse job.toml --each-stage"}
    lines = {
        "verify that it computes what one process does": "meshwright verify job.toml",
        "see every term of the prediction": "meshwright plan --check job.toml",
        **(rehearse if gpus * cluster.nodes > 1 else {}),
        **({"train it on your texts": train} if cluster.nodes == 1 else {}),
        "submit it to a Slurm site (leonardo, or your own profile)": submit,
        "save these charts": "meshwright report job.toml --out plan.html",
    }
    return [{"what": what, "command": command} for what, command in lines.items()]


def _config(state: dict[str, Any]) -> dict[str, Any]:
    from meshwright.job import model_of_config

    config = state.get("config")
    if not isinstance(config, dict):
        raise UserError("config is not a JSON object; give a Hugging Face config.json")
    model = model_of_config(config)
    return {"shape": shape_of(model)}


def _run(state: dict[str, Any]) -> dict[str, Any]:
    """A run's prediction compared with its measurements, as HTML; empty if its machine is unknown."""
    return {"html": expectations(state["job"], state["metrics"], state["events"])}
