"""`meshwright plan JOB --compare` and `--days`, `--budget`: one job on several machines, and how many it needs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshwright.cli.plan_search import Training, opened_job

if TYPE_CHECKING:
    from meshwright.job import Model
    from meshwright.job.devices import Cluster
    from meshwright.plan import Machines, Question


class Asked:
    """One job, asked about on whichever machines."""

    def __init__(
        self, source: str, overrides: list[str], seq: int | None, batch_tokens: int | None, training: Training
    ) -> None:
        self.opened = opened_job(source, overrides)
        self._sizes = {"sequence_length": seq, "batch_tokens": batch_tokens}
        self._training = training

    def __call__(self, cluster: "str | Cluster | None", model: "Model | None" = None) -> "Question":
        """The question on these machines, and for another model if one is given."""
        from meshwright.plan import question

        opened = self.opened
        return question(
            opened.job if model is None else opened.job.model_copy(update={"model": model}),
            cluster,
            exact=opened.exact,
            mtbf_hours=self._training.mtbf_hours,
            longest=opened.longest,
            **self._sizes,
        )

    @property
    def tokens(self) -> float | None:
        """Of the whole training: as given, else as many as the job's own steps take."""
        if self._training.tokens is not None or not self.opened.exact:
            return self._training.tokens
        return float(self.opened.job.run.steps * self.opened.job.tokens_per_step)


def show_comparison(
    source: str,
    overrides: list[str],
    seq: int | None,
    batch_tokens: int | None,
    clusters: Sequence[str],
    allow: list[str],
    training: Training,
    as_json: bool,
) -> None:
    """The fastest layout on each of several clusters, side by side."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.plan import on_machines

    ask = Asked(source, overrides, seq, batch_tokens, training)
    rows = on_machines(ask, clusters, allow, ask.tokens, training.price)
    if as_json:
        print_json({"tokens": ask.tokens, "clusters": [machines_row(one) for one in rows]})
        return
    stdout_console().print(_table(rows))
    for line in _below(rows):
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)


def show_size(
    source: str,
    cluster: str | None,
    overrides: list[str],
    seq: int | None,
    batch_tokens: int | None,
    allow: list[str],
    training: Training,
    days: float | None,
    budget: float | None,
    as_json: bool,
) -> None:
    """How many nodes a training needs to end within days, or that a budget pays for."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.errors import UserError
    from meshwright.plan import enough_machines

    ask = Asked(source, overrides, seq, batch_tokens, training)
    node = ask(cluster).machines
    option, asked_for = ("--days", days) if days is not None else ("--budget", budget)
    if ask.tokens is None:
        raise UserError(f"{option} = {asked_for:g} is about a whole training; give its length with --tokens")
    if budget is not None and training.price is None and node.price is None:
        raise UserError(f"--budget = {budget:g} needs the price of a GPU-hour; give --price or set cluster.price")
    rows, answer = enough_machines(ask, node, allow, ask.tokens, training.price, days=days, budget=budget)
    if answer is None:
        limits = [f"{days:g} days"] if days is not None else []
        limits += [f"a budget of {budget:,.0f}"] if budget is not None else []
        fastest = min((one for one in rows if one.economy), key=lambda one: one.economy.days, default=None)  # type: ignore[union-attr]
        near = "" if fastest is None or fastest.economy is None else _nearest(fastest)
        raise UserError(
            f"{option} = {asked_for:g}: no number of these nodes trains {ask.tokens:.3g} tokens within "
            f"{' and '.join(limits)}{near}; allow more, or other GPUs"
        )
    if as_json:
        print_json({"tokens": ask.tokens, "answer": machines_row(answer), "tried": [machines_row(one) for one in rows]})
        return
    stdout_console().print(_table(rows, answer))
    for line in [_answer(answer, rows, days), *_below(rows, answer)]:
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _answer(answer: "Machines", rows: "Sequence[Machines]", days: float | None) -> str:
    """When the training ends on the machines found, and which would do even at the slow end of the interval."""
    from meshwright.cli.plan_bars import interval

    assert answer.economy is not None and answer.bars is not None
    between = answer.bars.times(answer.economy.days)
    line = f"{answer.spelling}: {answer.economy.days:,.1f} days, {answer.bars.level:.0%} interval "
    line += interval(between, ",.1f")
    if days is None or between[1] <= days:
        return line
    sure = (one for one in rows if one.economy and one.bars and one.bars.times(one.economy.days)[1] <= days)
    safe = min(sure, key=lambda one: one.gpus, default=None)
    other = "no other that was tried" if safe is None else safe.spelling
    return f"{line}, which may be late; {other} would end in time at the slow end of its interval too"


def _nearest(one: "Machines") -> str:
    assert one.economy is not None
    cost = "" if one.economy.cost is None else f" for {one.economy.cost:,.0f}"
    return f" ({one.spelling} takes {one.economy.days:,.1f} days{cost})"


def _table(rows: "Sequence[Machines]", answer: "Machines | None" = None) -> Any:
    from rich.table import Table

    from meshwright.cli.plan_bars import interval
    from meshwright.plan import in_kwh, layout_words

    priced, timed = any(one.price for one in rows), any(one.economy for one in rows)
    columns = ["cluster", "tokens/s", "80% interval", "a GPU", "MFU", "GPU-hours per 10⁹ tokens"]
    columns += (["cost per 10⁹"] if priced else []) + (["days"] if timed else [])
    columns += ["cost"] if priced and timed else []
    powered = any(one.economy and one.economy.energy for one in rows)
    columns += ["energy"] if powered else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in [*columns, "layout"]:
        table.add_column(name, justify="left" if name in ("cluster", "layout") else "right", overflow="fold")
    for one in rows:
        name = one.spelling + (" ←" if one is answer else "")
        if one.found is None or one.bars is None:
            table.add_row(name, *[""] * (len(columns) - 1), "does not run")
            continue
        best = one.found.search.best[0]
        mfu = "–" if best.prediction.mfu is None else f"{best.prediction.mfu:.1%}"
        between = interval(rate * one.gpus for rate in one.bars.tokens_per_s_per_gpu)
        cells = [f"{one.tokens_per_s:,.0f}", between, f"{one.tokens_per_s / one.gpus:,.0f}", mfu]
        cells.append(f"{one.gpu_hours_per_billion:,.2f}")
        cells += ["–" if one.cost_per_billion is None else f"{one.cost_per_billion:,.2f}"] if priced else []
        cells += ["–" if one.economy is None else f"{one.economy.days:,.1f}"] if timed else []
        cost = None if one.economy is None else one.economy.cost
        cells += ["–" if cost is None else f"{cost:,.0f}"] if priced and timed else []
        energy = None if one.economy is None else one.economy.energy
        cells += ["–" if energy is None else in_kwh(energy.site_kwh or energy.gpu_kwh)] if powered else []
        table.add_row(name, *cells, layout_words(best.job))
    return table


def _below(rows: "Sequence[Machines]", answer: "Machines | None" = None) -> list[str]:
    """Why some do not run, what the others draw, what the intervals rest on, and what is guessed."""
    lines = [f"{one.spelling}: {one.why}" for one in rows if one.found is None]
    evidence: dict[str, list[str]] = {}
    for one in rows if answer is None else [answer]:
        if one.economy is not None and one.economy.energy is not None:
            lines.append(f"{one.spelling}: {one.economy.energy.sentence}")
        if one.bars is not None:
            evidence.setdefault(one.bars.evidence, []).append(one.spelling)
    lines += [f"evidence for {', '.join(names)}: {words}" for words, names in evidence.items()]
    predictions = [one.found.search.best[0].prediction for one in rows if one.found]
    lines += [f"profile: {used}" for used in dict.fromkeys(one.profile for one in predictions)]
    return lines + [
        f"guessed: {guess}" for guess in dict.fromkeys(guess for one in predictions for guess in one.guessed)
    ]


def machines_row(one: "Machines") -> dict[str, Any]:
    """A cluster's answer as JSON."""
    if one.found is None or one.bars is None:
        return {"cluster": one.spelling, "gpus": None, "why": one.why}
    best = one.found.search.best[0]
    return {
        "cluster": one.spelling,
        "gpus": one.gpus,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_gpu": best.prediction.tokens_per_s_per_gpu,
        "mfu": best.prediction.mfu,
        "profile": best.prediction.profile,
        "step_s": best.prediction.step_s,
        "interval": one.bars.as_json(),
        "evidence": {"time": one.bars.evidence, "memory": one.bars.memory_evidence},
        "device_bytes": best.prediction.fullest.device,
        "global_batch": best.job.batch.global_batch,
        "layout": best.job.layout.model_dump(mode="json"),
        "memory": best.job.memory.model_dump(mode="json"),
        "micro_batch": best.job.batch.micro_batch,
        "gpu_hours_per_billion_tokens": one.gpu_hours_per_billion,
        "cost_per_billion_tokens": one.cost_per_billion,
        "training": None if one.economy is None else asdict(one.economy),
    }
