"""The planning page's other questions: clusters side by side, how many nodes, the largest that fits, what a faster
machine brings, and what none beats; each as one table with its sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.studio.page_words import FieldError, in_page_words
from meshwright.studio.plan_request import LIMITS, asked, pick_of, shape_of, site_of
from meshwright.studio.scatter import Cloud, scatter
from meshwright.studio.training import amount_of

if TYPE_CHECKING:
    from meshwright.job import Model
    from meshwright.job.devices import Cluster
    from meshwright.plan import Candidate, Largest, Machines, Question

GIB = 2**30
ASKS = {
    "layouts": "Which layout is the fastest?",
    "compare": "Which of several clusters?",
    "size": "How many nodes, for days or a budget?",
    "model": "What is the largest model that fits?",
    "sequence": "What is the longest sequence that fits?",
    "batch": "What is the largest batch at once?",
    "sensitivity": "Which part of the machines to improve?",
    "pareto": "What to trade: time, memory, cost?",
}
"""As the page asks them."""
_MOST_CLUSTERS = 8


@dataclass(frozen=True)
class _Answer:
    """A table: a heading for every column, rows of text, and what opening a row changes in the form."""

    sentence: str
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    notes: Sequence[str] = ()
    picture: str = ""

    def shown(self) -> dict[str, Any]:
        """For the page."""
        words = ("cluster", "layout", "part", "model", "limited by")
        columns = [{"name": name, "number": name not in words} for name in self.columns]
        notes = [in_page_words(note) for note in dict.fromkeys(self.notes)]
        sentence = in_page_words(self.sentence)
        return {"sentence": sentence, "columns": columns, "rows": self.rows, "notes": notes, "picture": self.picture}


@dataclass(frozen=True)
class _Page:
    """The form, as far as these questions need it."""

    state: dict[str, Any]
    allow: list[str]
    stop: Callable[[], None]
    tokens: float | None = field(init=False)
    days: float | None = field(init=False)
    price: float | None = field(init=False)
    budget: float | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "days", "price", "budget"):
            object.__setattr__(self, name, amount_of(self.state, name))

    def ask(self, cluster: "str | Cluster | None" = None, model: "Model | None" = None) -> "Question":
        """The question on this cluster, by default the form's."""
        self.stop()
        if isinstance(cluster, str):
            cluster = self.cluster(cluster)
        return asked(self.state, cluster, model).question

    def cluster(self, spelling: str) -> "Cluster":
        """A cluster as people write it, within the form's limits."""
        from meshwright.plan import target_of

        try:
            found, _ = target_of(None, spelling)
        except UserError as error:
            raise FieldError("clusters", str(error).replace("--cluster", "Clusters")) from None
        for name, value in (("nodes", found.nodes), ("gpus", found.gpus_per_node)):
            if value > LIMITS[name][1]:
                raise FieldError("clusters", f"Clusters has {spelling[:60]}, which is too large; give fewer GPUs")
        return found.model_copy(update=site_of(self.state))

    def clusters(self) -> list[tuple[str, float | None]]:
        """The clusters of the form with their prices; each is checked."""
        from meshwright.plan import priced

        given = self.state.get("clusters") or ""
        names = str(given).replace(",", " ").split()
        if len(names) > _MOST_CLUSTERS:
            raise FieldError("clusters", f"Clusters has {len(names)} of them; give at most {_MOST_CLUSTERS}")
        found = [priced(name[:80], self.price) for name in names]
        for name, _ in found:
            self.cluster(name)
        return found


def other_answer(state: dict[str, Any], allow: list[str], stop: Callable[[], None]) -> dict[str, Any]:
    """The answer to the question that `state` names; `stop` is called between searches and may raise."""
    kinds = {"compare": _compare, "size": _size, "sensitivity": _sensitivity, "pareto": _pareto}
    kinds |= {name: partial(_largest, name) for name in ("model", "sequence", "batch")}
    kind = str(state.get("ask"))
    if kind not in kinds:
        raise FieldError("ask", f"Question = {kind[:40]} is not one of the page's; choose one from the list")
    return kinds[kind](_Page(state, allow, stop)).shown()


def _compare(page: _Page) -> _Answer:
    from meshwright.plan import on_machines

    places = page.clusters()
    if not places:
        raise FieldError("clusters", "Clusters is empty; give some to compare, as 64xh100@2.5 32xb200@4")
    rows = [on_machines(page.ask, [name], page.allow, page.tokens, price)[0] for name, price in places]
    running = [one for one in rows if one.found is not None]
    if not running:
        return _machines(rows, "The job does not run on any of them.")
    fastest = max(running, key=lambda one: one.tokens_per_s)
    sentence = f"{fastest.spelling} is the fastest"
    costs = [one for one in running if one.cost_per_billion is not None]
    if costs:
        cheapest = min(costs, key=lambda one: one.cost_per_billion or 0.0)
        sentence += f", {cheapest.spelling} the cheapest per token" if cheapest is not fastest else " and the cheapest"
    return _machines(rows, f"{sentence}.")


def _size(page: _Page) -> _Answer:
    from meshwright.plan import enough_machines

    if page.tokens is None:
        raise FieldError("tokens", "Tokens is empty; give the length of the training")
    if page.days is None and page.budget is None:
        raise FieldError("days", "Days and Budget are empty; give one of them")
    if page.budget is not None and page.price is None:
        raise FieldError("price", "Price is empty; a budget needs the price of a GPU-hour")
    node = page.ask().machines
    limits = {"days": page.days, "budget": page.budget}
    rows, answer = enough_machines(page.ask, node, page.allow, page.tokens, page.price, **limits)
    if answer is None:
        return _machines(rows, "No number of these nodes is enough; allow more days or money, or other GPUs.")
    return _machines(rows, f"{answer.spelling}: {answer.gpus} GPUs.", answer)


def _machines(rows: "Sequence[Machines]", sentence: str, answer: "Machines | None" = None) -> _Answer:
    from meshwright.plan import in_kwh

    columns = ("cluster", "tokens/s", "MFU", "GPU-hours per 10⁹ tokens", "cost per 10⁹", "days", "cost", "energy")
    shown, notes = [], []
    for one in rows:
        if one.found is None:
            shown.append(_row([one.spelling, *["–"] * (len(columns) - 1), "does not run"]))
            notes.append(f"{one.spelling}: {one.why}")
            continue
        best, whole = one.found.search.best[0], one.economy
        energy = None if whole is None else whole.energy
        cells = [one.spelling, f"{one.tokens_per_s:,.0f}", _share(best), f"{one.gpu_hours_per_billion:,.2f}"]
        cells.append("–" if one.cost_per_billion is None else f"{one.cost_per_billion:,.2f}")
        cells.append("–" if whole is None else f"{whole.days:,.1f}")
        cells.append("–" if whole is None or whole.cost is None else f"{whole.cost:,.0f}")
        cells.append("–" if energy is None else in_kwh(energy.site_kwh or energy.gpu_kwh))
        shown.append(_row([*cells, _words(best)], _opened(one.found.question, best), chosen=one is answer))
        if energy is not None:
            notes.append(f"{one.spelling}: {energy.sentence}")
        notes += [f"guessed: {guess}" for guess in best.prediction.guessed]
    return _Answer(sentence, (*columns, "layout"), shown, notes)


def _largest(kind: Any, page: _Page) -> _Answer:
    from meshwright.plan import Within, largest, spelled

    within = Within()
    if kind != "batch" and page.tokens is not None:
        within = Within(page.tokens, page.days, None if page.price is None else page.budget, page.price)
    found = largest(kind, lambda model: page.ask(model=model), page.allow, within, 3, page.stop)
    if found is None:
        there = spelled(page.ask().machines)
        raise UserError(f"Nothing fits on {there}, however small; use more or larger GPUs")
    rows, question = [], found.found.question
    for one in found.found.search.best:
        prediction = one.prediction
        cells = [f"{prediction.tokens_per_s_per_gpu:,.0f}", _share(one), f"{prediction.step_s:.3g}"]
        cells += [f"{prediction.fullest.device / GIB:.1f}", _words(one)]
        rows.append(_row(cells, _opened(question, one, shaped=True)))
    guessed = (f"guessed: {guess}" for guess in found.found.search.best[0].prediction.guessed)
    notes = [*_stopped(found), f"{found.meaning[0].upper()}{found.meaning[1:]}", *guessed]
    return _Answer(_size_words(found), ("tokens/s per GPU", "MFU", "step, s", "GiB", "layout"), rows, notes)


def _size_words(one: "Largest") -> str:
    from meshwright.plan import in_parameters

    job = one.found.question.job
    if one.kind == "model":
        shape = f"{job.model.layers} layers, {job.model.width} wide, {job.model.heads} heads"
        return f"A model of {in_parameters(one.size)} parameters: {shape}."
    if one.kind == "sequence":
        return f"Sequences of {one.size:,} tokens, {job.batch.global_batch} of them per step."
    return f"{one.size:,} sequences of {job.batch.sequence_length:,} tokens at once."


def _stopped(one: "Largest") -> list[str]:
    from meshwright.plan import in_parameters

    notes = []
    if one.next_size is not None:
        size = in_parameters(one.next_size) if one.kind == "model" else f"{one.next_size:,}"
        notes.append(f"{size} is too large: {one.next_why}")
    if one.presets:
        names = ", ".join(f"{name} ({in_parameters(size)})" for name, size in one.presets)
        notes.append(f"The largest presets that fit: {names}")
    return notes


def _sensitivity(page: _Page) -> _Answer:
    from meshwright.plan import sensitivity, spelled

    question = page.ask()
    found = sensitivity(question, page.allow, page.stop)
    if found is None:
        raise UserError(f"No layout fits on {spelled(question.machines)}; use more or larger GPUs")
    base = found.base
    rows = [
        _row(
            [
                gain.part,
                f"{gain.faster:+.1%}",
                f"{gain.best.prediction.step_s:.3g}",
                f"{gain.best.prediction.fullest.device / GIB:.1f}",
                _words(gain.best) if gain.moved else "the same",
            ]
        )
        for gain in found.gains
    ]
    notes = [
        f"As it is: {base.prediction.step_s:.3g} s per step, {_words(base)}",
        "Each part alone twice as good (latency: half), with the best layout searched again",
        *(f"guessed: {guess}" for guess in base.prediction.guessed),
    ]
    sentence = f"{found.sentence[0].upper()}{found.sentence[1:]}."
    return _Answer(sentence, ("part", "tokens/s", "step, s", "GiB", "layout"), rows, notes)


def _pareto(page: _Page) -> _Answer:
    from meshwright.plan import choices, frontier, frontier_words

    places: list[tuple[str | None, float | None]] = [*page.clusters()] or [(None, page.price)]
    tried, notes = [], []
    questions: dict[str, Question] = {}
    for name, price in places:
        question = page.ask(name)
        try:
            here = choices(question, price, page.allow, page.stop)
        except UserError as error:
            here = []
            notes.append(f"{name}: {error}")
        questions |= {one.spelling: question for one in here}
        tried += here
    if not tried:
        raise UserError(f"No layout fits; use more or larger GPUs{f' ({notes[0]})' if notes else ''}")
    kept = frontier(tried)
    rows = []
    for one in kept:
        cost = "–" if one.cost_per_billion is None else f"{one.cost_per_billion:,.2f}"
        cells = [one.spelling, f"{one.tokens_per_s:,.0f}", f"{one.one.prediction.step_s:.3g}", f"{one.memory_gib:.1f}"]
        cells += [f"{one.gpu_hours_per_billion:,.2f}", cost, _words(one.one)]
        rows.append(_row(cells, _opened(questions[one.spelling], one.one)))
        notes += [f"guessed: {guess}" for guess in one.one.prediction.guessed]
    clouds = [
        Cloud(
            name,
            [(one.memory_gib, one.tokens_per_s, one in kept, _words(one.one)) for one in tried if one.spelling == name],
        )
        for name in dict.fromkeys(one.spelling for one in tried)
    ]
    picture = scatter("Time and memory", "GiB per GPU", "tokens/s", clouds)
    columns = ("cluster", "tokens/s", "step, s", "GiB", "GPU-hours per 10⁹ tokens", "cost per 10⁹", "layout")
    return _Answer(f"{frontier_words(len(kept), tried)}.", columns, rows, notes, picture)


def _row(cells: list[str], opens: dict[str, Any] | None = None, *, chosen: bool = False) -> dict[str, Any]:
    return {"cells": cells, "opens": opens, "chosen": chosen}


def _words(one: "Candidate") -> str:
    from meshwright.plan import layout_words

    return layout_words(one.job)


def _share(one: "Candidate") -> str:
    return "–" if one.prediction.mfu is None else f"{one.prediction.mfu:.1%}"


def _opened(question: "Question", one: "Candidate", *, shaped: bool = False) -> dict[str, Any]:
    """What the form has to say for the page to show this layout."""
    cluster, batch = question.machines, one.job.batch
    form: dict[str, Any] = {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus_per_node,
        "gpu": cluster.gpu,
        "seq": str(batch.sequence_length),
        "batch": str(batch.global_batch * batch.sequence_length),
        "pick": pick_of(one.job),
    }
    if shaped:
        form["shape"] = {name: value for name, value in shape_of(question.job.model).items() if value is not None}
    if network := (cluster.links or {}).get("network"):
        form["network_link"] = network
    return form
