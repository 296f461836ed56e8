"""`meshwright plan JOB --largest`, `--sensitivity` and `--pareto`: what fits, what to buy, and what to choose from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from meshwright.cli.plan_machines import Asked
from meshwright.cli.plan_search import GIB, Training, host_lines
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.plan import Candidate, Choice, Kind, Largest, Question, Sensitivity


_MOST_LAYOUTS = 3
"""Of the largest size: the fastest are enough to see how tight it is."""


@dataclass(frozen=True)
class Wanted:
    """The question, as the options give it."""

    largest: str | None
    sensitivity: bool
    pareto: bool
    clusters: tuple[str, ...]
    """Of --compare."""
    days: float | None
    budget: float | None
    top: int

    def check(self, cluster: str | None, tokens: float | None) -> None:
        """Refuse what makes no sense together."""
        from meshwright.plan import LARGEST_KINDS

        asked = {"--largest": self.largest, "--sensitivity": self.sensitivity, "--pareto": self.pareto}
        names = [name for name, given in asked.items() if given]
        if len(names) > 1:
            raise UserError(f"{names[0]} and {names[1]} are two questions; ask one at a time")
        option = names[0] if names else "--largest"
        if self.largest is not None and self.largest not in LARGEST_KINDS:
            raise UserError(f"--largest = {self.largest} is not a size; give one of {', '.join(LARGEST_KINDS)}")
        if self.clusters and self.sensitivity:
            raise UserError("--sensitivity is about one cluster; name it with --cluster instead of --compare")
        if self.clusters and cluster is not None:
            raise UserError(f"--cluster = {cluster} is one cluster too many beside --compare; give it to --compare")
        limit = "--days" if self.days is not None else "--budget" if self.budget is not None else None
        if limit is None:
            return
        if self.largest is None or self.largest == "batch":
            instead = "--largest batch" if self.largest else option
            raise UserError(
                f"{limit} limits a training, and {instead} does not depend on one; leave one of them out, or ask for "
                "--largest model"
            )
        if tokens is None:
            raise UserError(f"{limit} is about a whole training; give its length with --tokens")


def show_question(
    wanted: Wanted,
    source: str,
    cluster: str | None,
    overrides: list[str],
    seq: int | None,
    batch_tokens: int | None,
    allow: list[str],
    training: Training,
    as_json: bool,
) -> None:
    """Answer one of the questions, as a table with its sentences or as JSON."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.plan import priced

    ask = Asked(source, overrides, seq, batch_tokens, training)
    wanted.check(cluster, ask.tokens)
    places: list[tuple[str | None, float | None]] = [priced(name, training.price) for name in wanted.clusters]
    places = places or [(cluster, training.price)]
    if wanted.largest is not None:
        shown = _largest(wanted, source, ask, places, allow)
    elif wanted.sensitivity:
        shown = _sensitivity(ask(cluster), allow, source)
    else:
        shown = _pareto(ask, places, allow)
    if as_json:
        print_json(shown.as_json)
        return
    console = stdout_console()
    console.print(_table(shown.columns, shown.rows))
    for line in shown.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Shown:
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]
    as_json: dict[str, Any]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        left = name in ("cluster", "layout", "part", "parameters", "then the best layout")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _largest(
    wanted: Wanted, source: str, ask: Asked, places: Sequence[tuple[str | None, float | None]], allow: list[str]
) -> _Shown:
    from meshwright.plan import Within, find_layouts, largest, layout_words, spelled

    kind = cast("Kind", wanted.largest)
    found: list[tuple[Question, Largest]] = []
    for cluster, price in places:
        asked = ask(cluster)
        if wanted.budget is not None and price is None and asked.machines.price is None:
            raise UserError(f"--budget = {wanted.budget:g} needs the price of a GPU-hour; give --price")
        within = Within(ask.tokens, wanted.days, wanted.budget, price)
        one = largest(kind, partial(ask, cluster), allow, within, min(wanted.top, _MOST_LAYOUTS))
        if one is None:
            if not within:
                find_layouts(asked, 1, allow, source)  # which says what would fit
            raise UserError(
                f"--largest {kind}: nothing fits on {spelled(asked.machines)}, however small; give more or larger GPUs"
                f"{', or more days or money' if within else ''}"
            )
        found.append((asked, one))
    size = {"model": "parameters", "sequence": "tokens of a sequence", "batch": "sequences at once"}[kind]
    rows, lines = [], []
    for asked, one in found:
        name = spelled(asked.machines)
        for place, candidate in enumerate(one.found.search.best):
            prediction = candidate.prediction
            first = [name, _in_words(kind, one)] if place == 0 else ["", ""]
            rate, mfu = f"{prediction.tokens_per_s_per_gpu:,.0f}", prediction.mfu
            figures = [rate, "–" if mfu is None else f"{mfu:.1%}", f"{prediction.step_s:.3g}"]
            memory = f"{prediction.fullest.device / GIB:.1f}"
            rows.append([*first, *figures, memory, layout_words(candidate.job)])
        hosts = host_lines(one.found.search.best[0], asked.machines)
        lines += [f"{name}: {line}" for line in (*_about(one), *hosts)]
    lines = [found[0][1].meaning, *lines, *_guesses([one.found.search.best[0] for _, one in found])]
    columns = ("cluster", size, "tokens/s per GPU", "MFU", "step s", "GiB", "layout")
    answers = [{"cluster": spelled(asked.machines), **_largest_json(one)} for asked, one in found]
    return _Shown(columns, rows, lines, {"largest": kind, "clusters": answers})


def _in_words(kind: "Kind", one: "Largest") -> str:
    from meshwright.plan import in_parameters

    if kind != "model":
        return f"{one.size:,}"
    model = one.found.question.job.model
    return f"{in_parameters(one.size)}: {model.layers} layers of {model.width}, {model.heads} heads"


def _about(one: "Largest") -> list[str]:
    """What stops it, and what else fits."""
    from meshwright.plan import in_parameters

    batch = one.found.question.job.batch
    lines = [f"{batch.global_batch} sequences of {batch.sequence_length} tokens per step"]
    if one.next_size is not None:
        following = in_parameters(one.next_size) if one.kind == "model" else f"{one.next_size:,}"
        lines.append(f"{following} is too large: {one.next_why}")
    if one.kind == "model":
        names = ", ".join(f"{name} ({in_parameters(size)})" for name, size in one.presets)
        lines.append(f"the largest presets that fit: {names}" if names else "no preset fits")
    return lines


def _largest_json(one: "Largest") -> dict[str, Any]:
    model = one.found.question.job.model
    shape = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "vocab_size", "max_sequence_length")
    return {
        "size": one.size,
        "meaning": one.meaning,
        "model": {name: getattr(model, name) for name in shape},
        "next_size": one.next_size,
        "next_why": one.next_why,
        "tried": [{"size": size, "fits": fits} for size, fits in one.tried],
        "presets": [{"preset": name, "parameters": size} for name, size in one.presets],
        "layouts": [candidate_json(each) for each in one.found.search.best],
    }


def _sensitivity(asked: "Question", allow: list[str], called: str) -> _Shown:
    from meshwright.plan import find_layouts, layout_words, sensitivity, spelled

    found = sensitivity(asked, allow)
    if found is None:
        find_layouts(asked, 1, allow, called)  # which says why nothing fits
        raise UserError(f"no layout of {called} fits on {spelled(asked.machines)}; give more or larger GPUs")
    rows = [
        [
            gain.part,
            f"{gain.faster:+.1%}",
            f"{gain.best.prediction.step_s:.3g}",
            f"{gain.best.prediction.fullest.device / GIB:.1f}",
            layout_words(gain.best.job) if gain.moved else "the same",
        ]
        for gain in found.gains
    ]
    base = found.base.prediction
    lines = [
        found.sentence,
        f"as it is: {base.step_s:.3g} s per step, {base.fullest.device / GIB:.1f} GiB, {layout_words(found.base.job)}",
        "each part alone twice as good (latency: half), with the best layout searched again",
        *_guesses([found.base]),
    ]
    columns = ("part", "tokens/s", "step s", "GiB", "then the best layout")
    return _Shown(columns, rows, lines, _sensitivity_json(found, spelled(asked.machines)))


def _sensitivity_json(found: "Sensitivity", cluster: str) -> dict[str, Any]:
    gains = [
        {"part": gain.part, "faster": gain.faster, "moved": gain.moved, **candidate_json(gain.best)}
        for gain in found.gains
    ]
    return {"cluster": cluster, "sentence": found.sentence, "base": candidate_json(found.base), "gains": gains}


def _pareto(ask: Asked, places: Sequence[tuple[str | None, float | None]], allow: list[str]) -> _Shown:
    from meshwright.plan import choices, economy, frontier, frontier_words, layout_words, spelled

    tried: list[Choice] = []
    lines, tokens = [], ask.tokens
    clusters = {}
    for cluster, price in places:
        asked = ask(cluster)
        clusters[spelled(asked.machines)] = asked.machines
        try:
            here = choices(asked, price, allow)
        except UserError as error:
            here, why = [], str(error)
        else:
            why = "no layout fits"
        tried += here
        lines += [] if here else [f"{spelled(asked.machines)}: {why}"]
    if not tried:
        raise UserError(f"--pareto has nothing to choose from: {lines[0]}; give more or larger GPUs")
    kept = frontier(tried)
    paid = any(one.price is not None for one in kept)
    whole = [
        None if tokens is None else economy(one.one.job, one.one.prediction, clusters[one.spelling], tokens, one.price)
        for one in kept
    ]
    columns = ["cluster", "tokens/s", "step s", "GiB", "GPU-hours per 10⁹ tokens"]
    columns += (["cost per 10⁹"] if paid else []) + (["days"] if tokens is not None else [])
    rows = []
    for one, training in zip(kept, whole, strict=True):
        cells = [one.spelling, f"{one.tokens_per_s:,.0f}", f"{one.one.prediction.step_s:.3g}", f"{one.memory_gib:.1f}"]
        cells.append(f"{one.gpu_hours_per_billion:,.2f}")
        cells += ["–" if one.cost_per_billion is None else f"{one.cost_per_billion:,.2f}"] if paid else []
        cells += [] if training is None else [f"{training.days:,.1f}"]
        rows.append([*cells, layout_words(one.one.job)])
    lines.insert(0, frontier_words(len(kept), tried))
    answers = [
        {
            "cluster": one.spelling,
            "gpus": one.gpus,
            "tokens_per_s": one.tokens_per_s,
            "memory_gib": one.memory_gib,
            "gpu_hours_per_billion_tokens": one.gpu_hours_per_billion,
            "cost_per_billion_tokens": one.cost_per_billion,
            "training": None if training is None else asdict(training),
            **candidate_json(one.one),
        }
        for one, training in zip(kept, whole, strict=True)
    ]
    lines += _guesses([one.one for one in kept])
    return _Shown((*columns, "layout"), rows, lines, {"tokens": tokens, "tried": len(tried), "choices": answers})


def candidate_json(one: "Candidate") -> dict[str, Any]:
    """A layout and its figures."""
    named = ("batch", "layout", "memory", "precision")
    return {
        **{name: getattr(one.job, name).model_dump(mode="json") for name in named},
        "step_s": one.prediction.step_s,
        "tokens_per_s_per_gpu": one.prediction.tokens_per_s_per_gpu,
        "mfu": one.prediction.mfu,
        "device_bytes": one.prediction.fullest.device,
    }


def _guesses(found: "Sequence[Candidate]") -> list[str]:
    guesses = (guess for one in found for guess in one.prediction.guessed)
    return [f"guessed: {guess}" for guess in dict.fromkeys(guesses)]
