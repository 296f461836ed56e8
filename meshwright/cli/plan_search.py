"""`meshwright plan --model`: the fastest layouts that fit, and why the nearest others do not."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.job import Job, Model
    from meshwright.job.devices import Cluster
    from meshwright.plan import Candidate, Economy, Search

GIB = 2**30


@dataclass(frozen=True)
class Training:
    """The whole training, as given on the command line."""

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None


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
    from meshwright.api.planning import find_layouts
    from meshwright.cli.output import print_json, stdout_console, write_file
    from meshwright.plan import job_text, spelled, why_not

    model, job = _model(source, overrides)
    looked = find_layouts(
        model,
        job,
        cluster,
        seq or (job.batch.sequence_length if job else None),
        batch_tokens,
        top,
        allow,
        mtbf_hours=training.mtbf_hours,
        called=source,
    )
    found, machines, sequence, batch = looked.search, looked.machines, looked.sequence, looked.batch
    practice = looked.practice
    if write is not None:
        heading = f"planned for {spelled(machines)}: {_line(found.best[0])}"
        best = found.best[0].job.model_copy(update={"cluster": machines})
        write_file(write, job_text(best, heading), "--write")
    if as_json:
        print_json(_as_json(found, sequence, batch, practice, machines, training))
        return
    console = stdout_console()
    console.print(_table(found, machines, training))
    if practice:
        console.print(practice, markup=False, highlight=False, soft_wrap=True)
    predicted = f"{found.predicted} predicted" + ("" if found.exact else " (the limit)")
    console.print(
        f"{found.bounded} layouts bounded in {found.bound_s:.2f} s, {predicted}; "
        f"{batch} sequences of {sequence} tokens per step",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for line in _whole(found.best[0], machines, training):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for guess in found.best[0].prediction.guessed:
        console.print(f"guessed: {guess}", markup=False, highlight=False, soft_wrap=True)
    for miss in found.misses:
        console.print(f"faster but too large: {why_not(miss, found)}", markup=False, highlight=False, soft_wrap=True)


def _model(source: str, overrides: list[str]) -> "tuple[Model, Job | None]":
    """The model shape behind a preset, a Hugging Face folder, config or name, or a job; for a job, the job too."""
    from meshwright.errors import UserError
    from meshwright.job import (
        Model,
        folder_of,
        hub_name,
        is_model_folder,
        load_job,
        model_of_folder,
        model_preset,
        model_presets,
        preset_named,
        recipes,
        unknown_model,
    )
    from meshwright.job.hub import pinned

    preset = source if source in model_presets() or Path(source).exists() else preset_named(source)
    if preset in model_presets():
        return Model.model_validate({"preset": preset, **model_preset(preset)}), None
    if source.endswith(".json"):
        from meshwright.job import model_of_config
        from meshwright.job.reading import json_table, read_settings_text

        path, remedy = Path(source), "give --model a Hugging Face config.json"
        return model_of_config(json_table(path, read_settings_text(path, remedy), remedy), source), None
    if is_model_folder(source):
        return model_of_folder(Path(source).expanduser()), None
    if hub_name(source) is not None and not source.endswith(".toml"):
        return model_of_folder(folder_of(pinned(source, f"--model {source}"))), None
    if not (Path(source).exists() or source.endswith(".toml") or source in recipes()):
        other = "give a job, a Hugging Face folder or config.json, or a name as org/name"
        raise UserError(unknown_model(f"--model {source}", source, other))
    job = load_job(source, overrides, trust=True).job  # none of its code is run
    return job.model, job


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
    line = f"{report.tokens:.3g} tokens: {report.days:,.1f} days, {report.gpu_hours:,.0f} {best.prediction.per}-hours"
    line += "" if report.cost is None else f", cost {report.cost:,.0f}"
    if report.goodput is None or report.save_every_s is None:
        return [line, "failures are not counted; give --mtbf-hours to count them"]
    saves = f"a checkpoint of {report.save_s:.1f} s every {report.save_every_s / 60:.0f} minutes"
    return [line, f"goodput {report.goodput:.1%}: {saves}, each failure loses half of that interval and a restart"]


def _table(found: "Search", cluster: "Cluster", training: Training) -> Any:
    from rich.table import Table

    from meshwright.plan import layout_words, limit

    table = Table(box=None, pad_edge=False, header_style="bold")
    rate = f"tokens/s per {found.best[0].prediction.per}"
    columns = ["layout", rate, "MFU", "step s", "GiB"] + (["days"] if training.tokens else [])
    for name in [*columns, "limited by"]:
        table.add_column(name, justify="left" if name in ("layout", "limited by") else "right", overflow="fold")
    for one in found.best:
        prediction = one.prediction
        mfu = "–" if prediction.mfu is None else f"{prediction.mfu:.1%}"
        size = f"{prediction.fullest.device / GIB:.1f}"
        rate = f"{prediction.tokens_per_s_per_gpu:,.0f}"
        report = _economy(one, cluster, training)
        days = [] if report is None else [f"{report.days:,.1f}"]
        table.add_row(layout_words(one.job), rate, mfu, f"{prediction.step_s:.3g}", size, *days, limit(prediction))
    return table


def _line(one: "Candidate") -> str:
    from meshwright.plan import layout_words

    rate = f"{one.prediction.tokens_per_s_per_gpu:,.0f} tokens/s per {one.prediction.per}"
    return f"{layout_words(one.job)}; {rate}, {one.prediction.fullest.device / GIB:.1f} GiB predicted"


def _as_json(
    found: "Search", sequence: int, batch: int, practice: str, cluster: "Cluster", training: Training
) -> dict[str, Any]:
    from meshwright.plan import limit, why_not

    def row(one: "Candidate") -> dict[str, Any]:
        named = ("batch", "layout", "memory", "precision")
        sections = {name: getattr(one.job, name).model_dump(mode="json") for name in named}
        report = _economy(one, cluster, training)
        return {
            **sections,
            "step_s": one.prediction.step_s,
            "tokens_per_s_per_gpu": one.prediction.tokens_per_s_per_gpu,
            "mfu": one.prediction.mfu,
            "device_bytes": one.prediction.fullest.device,
            "limited_by": limit(one.prediction),
            "training": None if report is None else asdict(report),
        }

    return {
        "sequence_length": sequence,
        "global_batch": batch,
        "batch_from": practice,
        "bounded": found.bounded,
        "predicted": found.predicted,
        "bound_s": found.bound_s,
        "exact": found.exact,
        "layouts": [row(one) for one in found.best],
        "misses": [why_not(one, found) for one in found.misses],
        "guessed": list(found.best[0].prediction.guessed),
    }
