"""`meshwright plan JOB`: the fastest layouts that fit, and why the nearest others do not."""

from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.job import Job, LoadedJob
    from meshwright.job.devices import Cluster
    from meshwright.plan import Candidate, Economy, Found

GIB = 2**30
_PLANNED = ("layout", "memory", "batch", "precision", "run", "cluster")
"""Sections in which a plan may change something."""


@dataclass(frozen=True)
class Training:
    """The whole training, as given on the command line."""

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None


@dataclass(frozen=True)
class Opened:
    """What `plan` was given."""

    job: "Job"
    file: "LoadedJob | None"
    """The text that a plan is written into: its file or recipe, or the start of a job from a model's weights; None for
    a shape, of which there is no job yet."""
    exact: bool = False
    """Whether it is a job as somebody wrote it; else what it does not say is taken as usual."""
    longest: bool = False
    """Whether the model's longest sequence was set, and so is what is asked about."""


def show_search(
    source: str,
    cluster: str | None,
    overrides: list[str],
    seq: int | None,
    batch_tokens: int | None,
    top: int,
    write: Path | None,
    allow: list[str],
    training: Training,
    as_json: bool,
) -> None:
    """Search, print and, if asked, write the best layout."""
    from meshwright.cli.output import print_json, stdout_console, write_file
    from meshwright.plan import find_layouts, question

    opened = opened_job(source, overrides)
    asked = question(
        opened.job,
        cluster,
        exact=opened.exact,
        sequence_length=seq,
        batch_tokens=batch_tokens,
        mtbf_hours=training.mtbf_hours,
        longest=opened.longest,
    )
    found = find_layouts(asked, top, allow, called=source)
    if write is not None:
        write_file(write, _written(opened, found, overrides, training, moved=cluster is not None), "--write")
    if as_json:
        print_json(_as_json(found, training))
        return
    console = stdout_console()
    console.print(_table(found, training))
    for line in _lines(found, training):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def opened_job(source: str, overrides: list[str]) -> Opened:
    """The job behind a job file or recipe, a preset, a Hugging Face folder, config or name, with what is set."""
    from meshwright.errors import UserError
    from meshwright.job import Job, changed_job, load_job, model_presets, preset_named, recipes, unknown_model

    longest = any(each.split("=")[0].strip() == "model.max_sequence_length" for each in overrides)
    chosen = ["batch.micro_batch=1", *overrides]  # which the search chooses, so that any batch may be set
    known = source in recipes() or Path(source).exists()
    preset = source if source in model_presets() or known else preset_named(source)
    if preset in model_presets() and not known:
        return Opened(changed_job(Job(), [f"model.preset={preset}", *chosen]), None, longest=longest)
    if (start := _weights_of(source)) is not None:
        return _from_weights(start, chosen, longest)
    if (model := _foreign_model(source)) is not None:
        return Opened(changed_job(Job().model_copy(update={"model": model}), chosen), None, longest=longest)
    if not (known or source.endswith(".toml")):
        other = "give a job, a Hugging Face folder or config.json, or a name as org/name"
        raise UserError(unknown_model(f"--model {source}", source, other))
    loaded = load_job(source, overrides, trust=True)  # none of its code is run
    return Opened(loaded.job, loaded, exact=True)


def _weights_of(source: str) -> str | None:
    """What `model.init_from` would be for a folder that holds weights, or for a Hugging Face name; else None."""
    from meshwright.job import holds_weights, hub_name, is_model_folder
    from meshwright.job.hub import pinned

    if is_model_folder(source):
        folder = Path(source).expanduser().absolute()  # the job may be written, and run, elsewhere
        return str(folder) if holds_weights(folder) else None
    if source.endswith((".json", ".toml")) or hub_name(source) is None or Path(source).is_dir():
        return None
    return pinned(source, f"--model {source}")


def _from_weights(start: str, chosen: list[str], longest: bool) -> Opened:
    """A job that starts from a model's weights.

    Fields of the shape may be planned otherwise; a job with such a contradiction is refused where it is written.
    """
    from meshwright.job import Job, LoadedJob, changed_job, folder_of, model_of_folder, toml_value
    from meshwright.job.init_from import TOKENIZER

    folder = folder_of(start)
    tokenizer = folder / TOKENIZER
    its_own = [f"data.tokenizer={toml_value(str(tokenizer))}"] if tokenizer.is_file() else []
    job = changed_job(Job().model_copy(update={"model": model_of_folder(folder)}), [*its_own, *chosen])
    job = job.model_copy(update={"model": job.model.model_copy(update={"init_from": start})})
    text = f"[model]\ninit_from = {toml_value(start)}\n"
    return Opened(job, LoadedJob(job, start, text, {}), longest=longest)


def _foreign_model(source: str) -> Any:
    """The shape of a Hugging Face config.json, or of a folder without weights; None for anything else."""
    from meshwright.job import is_model_folder, model_of_config, model_of_folder
    from meshwright.job.reading import json_table, read_settings_text

    if source.endswith(".json") and Path(source).name != "job.resolved.json":
        path, remedy = Path(source), "give --model a Hugging Face config.json"
        return model_of_config(json_table(path, read_settings_text(path, remedy), remedy), source)
    if is_model_folder(source):
        return model_of_folder(Path(source).expanduser())
    return None


def _written(opened: Opened, found: "Found", overrides: list[str], training: Training, *, moved: bool) -> str:
    """The best layout as a job file: the user's own with what the plan changes, or a new one for a model."""
    from meshwright.job import job_text, override_fields, planned_text
    from meshwright.plan import spelled

    best, machines = found.search.best[0], found.question.machines
    job = best.job
    if training.tokens is not None:
        run = job.run.model_copy(update={"steps": ceil(training.tokens / job.tokens_per_step)})
        job = job.model_copy(update={"run": run})
    if moved or not opened.exact:
        job = job.model_copy(update={"cluster": machines})
    heading = f"planned for {spelled(machines)}: {_line(best)}"
    if "sources" not in job.data.model_fields_set:
        heading += "\nTo train it, set data.sources to your texts."
    if opened.file is None:
        return job_text(job, heading)
    changed = [
        f"{section}.{field}"
        for section in _PLANNED
        for field in type(getattr(job, section)).model_fields
        if getattr(getattr(job, section), field) != getattr(getattr(opened.job, section), field)
    ]
    if opened.exact:
        return planned_text(opened.file, job, dict.fromkeys([*override_fields(overrides), *changed]))
    chosen = "batch.micro_batch"  # which was set before the search
    text = planned_text(opened.file, job, dict.fromkeys([*override_fields(overrides), chosen, *changed]))
    return "".join(f"# {line}\n" for line in heading.splitlines()) + f"\n{text}"


def _lines(found: "Found", training: Training) -> list[str]:
    """What is said below the table."""
    from meshwright.cli.plan_bars import bar_lines
    from meshwright.plan import error_bars, small_batch, tie_words, tied, why_not

    search, asked = found.search, found.question
    best, job = search.best[0], asked.job
    predicted = f"{search.predicted} predicted" + ("" if search.exact else " (the limit)")
    lines = [*asked.notes, *([asked.practice] if asked.practice else [])]
    lines.append(
        f"{search.bounded} layouts bounded in {search.bound_s:.2f} s, {predicted}; {job.batch.global_batch} sequences "
        f"of {job.batch.sequence_length} tokens per step"
    )
    lines += _mfu_lines(best, asked.machines)
    lines += bar_lines(error_bars(best.job, asked.machines, best.prediction), best.prediction)
    if (near := sum(tied(search.best))) > 1:
        lines.append(f"{near} layouts are a tie (≈), and the simplest of them is marked: {tie_words()}")
    gpus = asked.machines.nodes * asked.machines.gpus_per_node
    if warning := small_batch(best.job, best.prediction, gpus):
        lines.append(f"warning: {warning}")
    lines += host_lines(best, asked.machines)
    lines += _whole(best, asked.machines, training)
    lines.append(f"profile: {best.prediction.profile}")
    lines += [f"guessed: {guess}" for guess in best.prediction.guessed]
    return lines + [f"faster but too large: {why_not(miss, search)}" for miss in search.misses]


def _mfu_lines(best: "Candidate", machines: "Cluster") -> list[str]:
    """What the MFU is a share of, and how much it is with only the pairs that a causal mask leaves."""
    prediction, compute = best.prediction, best.job.precision.format
    if prediction.mfu is None:
        return []
    peak = prediction.model_flops_per_s_per_gpu / prediction.mfu / 1e12
    form = "bf16 peak, for fp8 too" if compute == "fp8" else f"{compute} peak"
    over = f"over {peak:,.0f} TFLOP/s, {machines.gpu}'s dense {form}"
    return [f"MFU: {over}; attention over every pair, {prediction.mfu_causal:.1%} with the causal half alone"]


def host_lines(best: "Candidate", machines: "Cluster") -> list[str]:
    """What a layout keeps in the memory of its hosts."""
    held = max(rank.host for rank in best.prediction.memory) * machines.gpus_per_node / GIB
    if not held:
        return []
    there = best.prediction.host_capacity_bytes
    if there is None:
        return [
            f"host memory: {held:,.0f} GiB per node; whether a node has as much is not known, give it with --set "
            "cluster.host_memory_gib=N"
        ]
    return [f"host memory: {held:,.0f} GiB per node of {there * machines.gpus_per_node / GIB:,.0f} GiB"]


def _economy(one: "Candidate", cluster: "Cluster", training: Training) -> "Economy | None":
    from meshwright.plan import economy

    if training.tokens is None:
        return None
    return economy(one.job, one.prediction, cluster, training.tokens, training.price)


def _whole(best: "Candidate", cluster: "Cluster", training: Training) -> list[str]:
    """The whole training with the best layout, in words."""
    report = _economy(best, cluster, training)
    if report is None:
        return []
    line = f"{report.tokens:.3g} tokens: {report.days:,.1f} days ({_days_interval(best, cluster, report)}), "
    line += f"{report.gpu_hours:,.0f} {best.prediction.per}-hours"
    line += "" if report.cost is None else f", cost {report.cost:,.0f}"
    steps = ceil(report.tokens / best.job.tokens_per_step)
    lines = [f"{line}, {steps:,} steps", *([report.energy.sentence] if report.energy else [])]
    size = f"a checkpoint of {report.checkpoint_bytes / 1e9:,.0f} GB blocks training for {report.save_s:.2f} s"
    size += f" and is written in {report.write_s:,.0f} s"
    if report.storage_guessed:
        size += " (guessed: 1 GB/s per node; --set cluster.storage_gb_s=N)"
    lines.append(size)
    if report.goodput is None or report.save_every_s is None:
        return [*lines, "failures are not counted; give --mtbf-hours to count them"]
    saves = f"a checkpoint every {_duration(report.save_every_s)}"
    return [
        *lines,
        f"goodput {report.goodput:.1%}: {saves}; each failure loses half of that, what is being written, and a restart",
    ]


def _days_interval(one: "Candidate", cluster: "Cluster", report: "Economy") -> str:
    from meshwright.cli.plan_bars import interval
    from meshwright.plan import error_bars

    bars = error_bars(one.job, cluster, one.prediction)
    return f"{bars.level:.0%} interval {interval(bars.times(report.days), ',.1f')}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _table(found: "Found", training: Training) -> Any:
    from rich.table import Table

    from meshwright.cli.plan_bars import interval
    from meshwright.plan import error_bars, layout_words, limit, simplest, tied

    best, machines = found.search.best, found.question.machines
    table = Table(box=None, pad_edge=False, header_style="bold")
    rate = f"tokens/s per {best[0].prediction.per}"
    columns = ["layout", rate, "80% interval", "MFU", "step s", "GiB"] + (["days"] if training.tokens else [])
    for name in [*columns, "limited by"]:
        table.add_column(name, justify="left" if name in ("layout", "limited by") else "right", overflow="fold")
    plain, ties = simplest(best), tied(best)
    for place, one in enumerate(best):
        prediction = one.prediction
        between = interval(error_bars(one.job, machines, prediction).tokens_per_s_per_gpu)
        words = layout_words(one.job) + (" (simplest)" if place == plain else "")
        mfu = "–" if prediction.mfu is None else f"{prediction.mfu:.1%}"
        size = f"{prediction.fullest.device / GIB:.1f}"
        rate = ("≈ " if place and ties[place] else "") + f"{prediction.tokens_per_s_per_gpu:,.0f}"
        report = _economy(one, machines, training)
        days = [] if report is None else [f"{report.days:,.1f}"]
        table.add_row(words, rate, between, mfu, f"{prediction.step_s:.3g}", size, *days, limit(prediction))
    return table


def _line(one: "Candidate") -> str:
    from meshwright.plan import layout_words

    rate = f"{one.prediction.tokens_per_s_per_gpu:,.0f} tokens/s per {one.prediction.per}"
    return f"{layout_words(one.job)}; {rate}, {one.prediction.fullest.device / GIB:.1f} GiB predicted"


def _as_json(found: "Found", training: Training) -> dict[str, Any]:
    from meshwright.plan import error_bars, limit, simplest, small_batch, tied, why_not

    search, asked = found.search, found.question
    machines, plain, ties = asked.machines, simplest(search.best), tied(search.best)
    bars = [error_bars(one.job, machines, one.prediction) for one in search.best]

    def row(place: int, one: "Candidate") -> dict[str, Any]:
        named = ("batch", "layout", "memory", "precision")
        sections = {name: getattr(one.job, name).model_dump(mode="json") for name in named}
        report = _economy(one, machines, training)
        return {
            **sections,
            "step_s": one.prediction.step_s,
            "tokens_per_s_per_gpu": one.prediction.tokens_per_s_per_gpu,
            "mfu": one.prediction.mfu,
            "device_bytes": one.prediction.fullest.device,
            "host_bytes_per_node": max(rank.host for rank in one.prediction.memory) * machines.gpus_per_node,
            "interval": bars[place].as_json(),
            "limited_by": limit(one.prediction),
            "tie": ties[place],
            "simplest": place == plain,
            "training": None if report is None else asdict(report),
        }

    best = search.best[0]
    warning = small_batch(best.job, best.prediction, machines.nodes * machines.gpus_per_node)
    return {
        "sequence_length": asked.job.batch.sequence_length,
        "global_batch": asked.job.batch.global_batch,
        "batch_from": asked.practice,
        "notes": list(asked.notes),
        "warning": warning,
        "nodes": machines.nodes,
        "gpus_per_node": machines.gpus_per_node,
        "bounded": search.bounded,
        "predicted": search.predicted,
        "bound_s": search.bound_s,
        "exact": search.exact,
        "layouts": [row(place, one) for place, one in enumerate(search.best)],
        "misses": [why_not(one, search) for one in search.misses],
        "evidence": {"time": bars[0].evidence, "memory": bars[0].memory_evidence},
        "profile": best.prediction.profile,
        "guessed": list(best.prediction.guessed),
    }
