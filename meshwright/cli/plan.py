"""`meshwright plan`: predict a job's memory and time term by term, and compare predictions with measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.amounts import token_option
from meshwright.cli.job import FORCE, JSON, SET

if TYPE_CHECKING:
    from meshwright.plan import ErrorBars, Prediction

JOB = typer.Argument(
    None, metavar="[JOB]", help="Find layouts for this job file, recipe or preset; after --compare, further clusters."
)
CHECK = typer.Option(None, "--check", metavar="JOB", help="Explain one job: memory and time, term by term.")
CLUSTER = typer.Option(
    None, "--cluster", help="Where it runs: 8xh100, 64xh100, 16x8xa100-80gb, 16xleonardo; else the job's [cluster]."
)
VALIDATE = typer.Option([], "--validate", metavar="ROWS.csv", help="Predict measured rows; may be repeated.")
MODEL = typer.Option(None, "--model", help="The same for a preset, a job, a Hugging Face folder or org/name.")
SEQ = token_option(None, "--seq", "Tokens per sequence; by default the job's, 4096, or the model's limit.", length=True)
BATCH = token_option(None, "--batch-tokens", "Tokens per step, e.g. 4M; by default typical for the model's size.")
TOP = typer.Option(10, "--top", min=1, help="Layouts shown.")
WRITE = typer.Option(
    None, "--write", metavar="OUT.toml", help="Write the job with the best layout, otherwise as it is."
)
ALLOW = typer.Option("", "--allow", metavar="WORDS", help="Also try any of fp8, offload and zero-bubble.")
TOKENS = token_option(
    None, "--tokens", "Tokens of the whole training, e.g. 15T or 2e12: adds days, GPU-hours and cost."
)
PRICE = typer.Option(None, "--price", help="Price of a GPU-hour; by default cluster.price.")
MTBF = typer.Option(
    None, "--mtbf-hours", help="Mean time between failures of the cluster; by default cluster.mtbf_hours."
)
COMPARE = typer.Option(
    [], "--compare", metavar="CLUSTER...", help="The job on several clusters: --compare 64xh100@2.5 32xb200@4 (price)."
)
DAYS = typer.Option(None, "--days", help="How many nodes of --cluster end the training of --tokens within these days.")
BUDGET = typer.Option(None, "--budget", help="How many nodes of --cluster this pays for, with --price per GPU-hour.")
LARGEST = typer.Option(
    None, "--largest", metavar="WHAT", help="The largest model, sequence or batch that fits the cluster, by bisection."
)
SENSITIVITY = typer.Option(
    False,
    "--sensitivity",
    help="How much faster with twice the compute, memory, bandwidth or network.",
)
PARETO = typer.Option(
    False, "--pareto", help="Layouts that none beats in time, memory and cost; with --compare over several clusters."
)
SCALE = typer.Option(None, "--scale", metavar="N,N", help="With --check: the same job on other numbers of GPUs.")
AXIS = typer.Option(None, "--axis", help="With --scale: the numbers are sizes of this axis (tp, cp, pp, dp_shard …).")
WEAK = typer.Option(False, "--weak/--strong", help="With --scale: the batch grows with the replicas, or stays fixed.")
SVG = typer.Option(None, "--svg", metavar="FILE", help="With --check: draw memory and time to this file.")
PROFILE = typer.Option(
    None, "--profile", metavar="FILE|FOLDER", help="Use this profile of the GPU, or this folder's: calibrate --export."
)
REHEARSAL = typer.Option(
    None,
    "--rehearsal",
    metavar="FOLDER",
    help="With --check: what a rehearsal of this job measured, next to the plan; by default the one in its folder.",
)
MARKDOWN = typer.Option(None, "--markdown", help="With --validate: write the table as a Markdown page here.")

GIB = 2**30
_FEW_GROUPS = 10
"""Groups of a source listed one by one; beyond that they are only in the JSON."""


def plan(
    context: typer.Context,
    given: list[str] | None = JOB,
    model: str | None = MODEL,
    cluster: str | None = CLUSTER,
    seq: int | None = SEQ,
    batch_tokens: int | None = BATCH,
    top: int = TOP,
    write: Path | None = WRITE,
    force: bool = FORCE,
    allow: str = ALLOW,
    tokens: int | None = TOKENS,
    price: float | None = PRICE,
    mtbf_hours: float | None = MTBF,
    compare: list[str] = COMPARE,
    profile: Path | None = PROFILE,
    days: float | None = DAYS,
    budget: float | None = BUDGET,
    largest: str | None = LARGEST,
    sensitivity: bool = SENSITIVITY,
    pareto: bool = PARETO,
    check: str | None = CHECK,
    scale: str | None = SCALE,
    axis: str | None = AXIS,
    weak: bool = WEAK,
    svg: Path | None = SVG,
    rehearsal: Path | None = REHEARSAL,
    overrides: list[str] = SET,
    validate: list[Path] = VALIDATE,
    markdown: Path | None = MARKDOWN,
    as_json: bool = JSON,
) -> None:
    """Find the fastest layout that fits, explain one job, or compare predictions with published runs."""
    from meshwright.cli.output import require_new
    from meshwright.errors import UserError
    from meshwright.hardware import profiles_from

    context.with_resource(profiles_from(profile))
    for option, path in (("--write", write), ("--svg", svg), ("--markdown", markdown)):
        require_new(path, option, force)
    job, clusters = _arguments(given or [], model, compare)
    if sum(map(bool, (job, model, check, validate))) != 1:
        raise UserError(
            "plan needs a JOB to find layouts for, --model NAME, --check JOB or --validate ROWS.csv; give exactly one "
            "of them"
        )
    source = job or model
    if write is not None and not source:
        raise UserError(f"--write = {write} writes the layout that a search finds; give it with JOB or --model NAME")
    if markdown is not None and not validate:
        raise UserError(f"--markdown = {markdown} writes the table of --validate; give --validate or leave it out")
    if profile is not None and validate:
        raise UserError(f"--profile = {profile} measures our own programs, not those of --validate; leave it out")
    if scale is not None and not check:
        raise UserError(f"--scale = {scale} shows one job on other numbers of GPUs; give it with --check JOB")
    if svg is not None and (not check or scale is not None):
        raise UserError(f"--svg = {svg} draws one job; give it with --check JOB, without --scale, or leave it out")
    if rehearsal is not None and (not check or scale is not None):
        raise UserError(
            f"--rehearsal = {rehearsal} is of one job; give it with --check JOB, without --scale, or leave it out"
        )
    amounts = {"--price": price, "--mtbf-hours": mtbf_hours, "--days": days, "--budget": budget}
    for option, value in amounts.items():
        if value is not None and not value > 0:
            raise UserError(f"{option} = {value:g} must be greater than 0; correct it or leave it out")
    asks_machines = {"--compare": clusters, "--days": days, "--budget": budget}
    asked = {**asks_machines, "--largest": largest, "--sensitivity": sensitivity, "--pareto": pareto}
    for option, given_value in asked.items():
        if given_value and (not source or write is not None):
            raise UserError(
                f"{option} asks about machines for a job; give it with JOB or --model NAME, without --write"
            )
    if price is not None and tokens is None and not (pareto or any(asks_machines.values())):
        raise UserError(f"--price = {price:g} prices the whole training; give its length with --tokens")
    if source:
        from meshwright.cli.plan_search import Training, show_search

        training = Training(None if tokens is None else float(tokens), price, mtbf_hours)
        words = [word for word in allow.split(",") if word]
        if largest is not None or sensitivity or pareto:
            from meshwright.cli.plan_questions import Wanted, show_question

            wanted = Wanted(largest, sensitivity, pareto, tuple(clusters), days, budget, top)
            show_question(wanted, source, cluster, overrides, seq, batch_tokens, words, training, as_json)
            return
        if clusters:
            from meshwright.cli.plan_machines import show_comparison

            show_comparison(source, overrides, seq, batch_tokens, clusters, words, training, as_json)
            return
        if days is not None or budget is not None:
            from meshwright.cli.plan_machines import show_size

            sizes = (seq, batch_tokens, words, training, days, budget)
            show_size(source, cluster, overrides, *sizes, as_json)
            return
        show_search(source, cluster, overrides, seq, batch_tokens, top, write, words, training, as_json)
    elif check and scale is not None:
        from meshwright.cli.plan_scale import show_scale

        show_scale(check, cluster, overrides, scale, axis, weak, as_json)
    elif check:
        _check(check, cluster, overrides, svg, rehearsal, as_json)
    else:
        _validate(validate, markdown, as_json)


def _arguments(given: list[str], model: str | None, compare: list[str]) -> tuple[str | None, list[str]]:
    """The job, and the clusters to compare: `--compare A B C` leaves all but the first to the arguments."""
    from meshwright.errors import UserError

    job, more = (None, given) if model or not given else (given[0], given[1:])
    if more and not compare:
        raise UserError(f"{more[0]} is one argument too many; give one JOB, or clusters to --compare")
    return job, [name for each in (*compare, *more) for name in each.split(",") if name]


def _check(
    source: str, cluster: str | None, overrides: list[str], svg: Path | None, rehearsal: Path | None, as_json: bool
) -> None:
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.cli.plan_rehearsal import find_rehearsal, rehearsal_json, rehearsal_lines, rehearsal_tables
    from meshwright.job import load_job
    from meshwright.layout import ranks_of, resolve_for
    from meshwright.plan import check_target, error_bars, predict, why_refused

    job = load_job(source, overrides, trust=True).job  # none of its code is run
    found = find_rehearsal(job, source, rehearsal, cluster)
    machines, note = check_target(job, cluster or found.cluster_of(job))
    job = resolve_for(job, machines)
    prediction = predict(job, machines)
    bars = error_bars(job, machines, prediction)
    known = found.evidence(job, machines, prediction, bars)
    refused = why_refused(job, ranks_of(job.layout))
    if svg is not None:
        from meshwright.studio import write_plan_svg

        write_plan_svg(prediction, svg)
    if as_json:
        own = _as_json(prediction, bars) | {"refused": refused}
        print_json(own | ({} if known is None else rehearsal_json(found, known)))
        return
    console = stdout_console()
    for table in (_phase_table(prediction), _memory_table(prediction), *rehearsal_tables(known)):
        console.print(table)
    refusal = [] if refused is None else [f"train refuses this job: {refused}"]
    for line in [*([note] if note else []), *_summary(prediction, bars), *rehearsal_lines(found, known), *refusal]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _as_json(prediction: "Prediction", bars: "ErrorBars") -> dict[str, Any]:
    return {
        "kind": "CPU" if prediction.on_cpu else "GPU",
        "step_s": prediction.step_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "mfu_causal": prediction.mfu_causal,
        "fits": prediction.fits,
        "capacity_bytes": prediction.capacity_bytes,
        "phases_s": prediction.phases,
        "memory": [
            {
                "rank": rank.rank,
                "terms_bytes": rank.terms,
                "allocated_bytes": rank.allocated,
                "reserved_bytes": rank.reserved,
                "device_bytes": rank.device,
                "host_bytes": rank.host,
            }
            for rank in prediction.memory
        ],
        "interval": bars.as_json(),
        "evidence": {"time": bars.evidence, "memory": bars.memory_evidence},
        "profile": prediction.profile,
        "guessed": list(prediction.guessed),
        "not_modelled": list(prediction.not_modelled),
    }


def _phase_table(prediction: "Prediction") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("time of a step")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in prediction.phases.items():
        if seconds > 0:
            table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / prediction.step_s:.1%}")
    table.add_row("step", f"{1e3 * prediction.step_s:.2f}", "", style="bold")
    return table


def _memory_table(prediction: "Prediction") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB by pipeline rank")
    for rank in prediction.memory:
        table.add_column(str(rank.rank), justify="right")
    names = dict.fromkeys(name for rank in prediction.memory for name, size in rank.terms.items() if size)
    for name in names:
        table.add_row(name, *(f"{rank.terms.get(name, 0.0) / GIB:.2f}" for rank in prediction.memory))
    table.add_row("allocated", *(f"{rank.allocated / GIB:.2f}" for rank in prediction.memory), style="bold")
    table.add_row("rounding and holes", *(f"{rank.fragments / GIB:.2f}" for rank in prediction.memory))
    outside = "Python and its libraries" if prediction.on_cpu else "driver and communicators"
    table.add_row(outside, *(f"{rank.outside / GIB:.2f}" for rank in prediction.memory))
    if any(rank.host for rank in prediction.memory):
        table.add_row("in the host's memory", *(f"{rank.host / GIB:.2f}" for rank in prediction.memory))
    table.add_row(
        "in all" if prediction.on_cpu else "on the device",
        *(f"{rank.device / GIB:.2f}" for rank in prediction.memory),
        style="bold",
    )
    return table


def _summary(prediction: "Prediction", bars: "ErrorBars") -> list[str]:
    from meshwright.cli.plan_bars import bar_lines

    mfu = ""
    if prediction.mfu is not None:
        mfu = f", MFU {prediction.mfu:.1%} (attention over every pair; {prediction.mfu_causal:.1%} over causal ones)"
    over = prediction.fullest.device - prediction.capacity_bytes
    room = f"fits with {-over / GIB:.1f} GiB to spare" if over <= 0 else f"does not fit: {over / GIB:.1f} GiB over"
    lines = [
        f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s per {prediction.per}{mfu}",
        f"{room} on pipeline rank {prediction.fullest.rank} of {prediction.capacity_bytes / GIB:.0f} GiB",
    ]
    if prediction.host_over_bytes:
        kept, there = max(rank.host for rank in prediction.memory), prediction.host_capacity_bytes or 0.0
        lines.append(f"does not fit its host: {kept / GIB:.1f} GiB are needed per GPU, which has {there / GIB:.1f} GiB")
    lines += bar_lines(bars, prediction)
    lines.append(f"profile: {prediction.profile}")
    lines += [f"guessed: {guess}" for guess in prediction.guessed]
    return lines + [f"not modelled: {what}" for what in prediction.not_modelled]


def _validate(paths: list[Path], markdown: Path | None, as_json: bool) -> None:
    from meshwright.cli.output import print_json, stderr_console, stdout_console, write_file
    from meshwright.cli.plan_bars import coverage_lines, own_lines
    from meshwright.errors import UserError
    from meshwright.plan import accuracy_page, accuracy_rows, guessed_rows, validate

    for path in paths:
        if not path.is_file():
            raise UserError(f"--validate = {path} is not a file; give a CSV of measured rows")
    console = stderr_console()
    with console.status("predicting every row") if console.is_terminal else _nothing():
        summary = validate(paths).summary()
    if markdown is not None:
        write_file(markdown, accuracy_page(summary, [path.name for path in paths]), "--markdown")
    if as_json:
        print_json(summary)
        return
    from rich.table import Table

    header, *rows = accuracy_rows(summary)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)
    for line in [*own_lines(summary), *coverage_lines(summary)]:
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)
    for run, gpus, layout, use, predicted, measured, error in guessed_rows(summary)[1:]:
        line = f"rates guessed, {use} {run}: {gpus}, {layout}: {predicted} s predicted, {measured} s measured, {error}"
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)
    for group in summary["groups"]:
        if summary["sources"][group["group"].partition(" ")[0]]["groups"] <= _FEW_GROUPS:
            line = f"{group['group']}: chose {group['chosen']}, best {group['best']}, regret {group['regret']:.1%}"
            stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)
    for row in summary["unpredicted"]:
        stdout_console().print(f"left out {row['id']}: {row['reason']}", markup=False, highlight=False, soft_wrap=True)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
