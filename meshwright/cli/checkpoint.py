"""`meshwright checkpoint`: inspect and manage what a run has saved."""

from pathlib import Path
from typing import Any

import typer

from meshwright.cli import checkpoint_hf
from meshwright.cli.job import JSON

app = typer.Typer(
    help="List, show, verify, compare and prune a run's checkpoints; import and export Hugging Face folders.",
    no_args_is_help=True,
)
app.command("import")(checkpoint_hf.import_)
app.command("export")(checkpoint_hf.export)

RUN = typer.Argument(help="A run folder.")
ONE = typer.Argument(help="A run folder (its newest complete checkpoint) or one of its checkpoints/step-… folders.")


@app.command("list")
def list_(run: Path = RUN, as_json: bool = JSON) -> None:
    """List a run's checkpoints and their backups, newest first, and say what is wrong with incomplete ones."""
    from meshwright.checkpoint import Checkpoint, backup_target, backups, checkpoints
    from meshwright.errors import UserError
    from meshwright.runs import RunFolder

    RunFolder.open(run)
    rows: list[dict[str, Any]] = []
    for found in checkpoints(run):
        if isinstance(found, Checkpoint):
            manifest = found.manifest
            row = {
                "step": manifest.step,
                "attempt": manifest.attempt,
                "ranks": found.index.ranks,
                "time": manifest.time,
            }
            rows.append({**row, "bytes": found.bytes, "damage": None})
        else:
            rows.append({**dict.fromkeys(("step", "attempt", "ranks", "time", "bytes")), "damage": str(found)})
    target, unreachable = backup_target(run), None
    try:
        copies = backups(run, target) if target else []
    except UserError as error:  # the folder's contents can still be listed
        copies, unreachable = [], str(error)
    if as_json:
        report = [{"step": copy.step, "place": copy.place, "complete": copy.complete} for copy in copies]
        backup = {"target": target, "error": unreachable, "copies": report}
        _print_json({"run": str(run), "checkpoints": rows, "backup": backup})
        return
    if rows:
        _print_rows(rows)
    else:
        print(f"{run} has no checkpoints")
    if unreachable:
        print(f"backup: {unreachable}")
    for copy in copies:
        print(f"backup: step {copy.step} at {copy.place}{'' if copy.complete else ', incomplete'}")


@app.command()
def restore(run: Path = RUN, as_json: bool = JSON) -> None:
    """Restore a run's newest intact backup into its folder; `train --resume` does so if no checkpoint is left."""
    from meshwright.checkpoint import backup_target
    from meshwright.checkpoint import restore as bring_back
    from meshwright.errors import UserError
    from meshwright.runs import RunFolder

    RunFolder.open(run)
    target = backup_target(run)
    if target is None:
        raise UserError(f"{run} has no backup: its job sets no checkpoint.backup_to; nothing can be restored")
    found, passed_over = bring_back(run, target)
    if found is None:
        report = f" ({passed_over[0]})" if passed_over else ""
        raise UserError(
            f"checkpoint.backup_to = {target} has no intact copy of {run}{report}; start the run from scratch"
        )
    if as_json:
        _print_json(
            {"run": str(run), "step": found.facts.step, "path": str(found.path), "from": target, "refused": passed_over}
        )
        return
    for damage in passed_over:
        print(f"skipped: {damage}")
    print(f"step {found.facts.step} restored from {target}: {found.path}")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    shown = [
        [
            *("–" if row[name] is None else str(row[name]) for name in ("step", "attempt", "ranks", "time")),
            "–" if row["bytes"] is None else _size(row["bytes"]),
            row["damage"] or "complete",
        ]
        for row in rows
    ]
    _print_table(("step", "attempt", "ranks", "saved", "size", "state"), shown)


@app.command()
def show(checkpoint: Path = ONE, as_json: bool = JSON) -> None:
    """Show a run's state at a checkpoint, and what was saved."""
    from meshwright.checkpoint import open_checkpoint

    one = open_checkpoint(checkpoint)
    groups: dict[str, list[int]] = {}
    for name, tensor in one.index.tensors.items():
        count = groups.setdefault(name.partition("/")[0], [0, 0, 0])
        entries = 1
        for size in tensor.shape:
            entries *= size
        count[0], count[1], count[2] = count[0] + 1, count[1] + entries, count[2] + len(tensor.pieces)
    given = one.job().get("layout", {})
    layout = {name: value for name, value in given.items() if value not in (1, None, "none", False)}
    if as_json:
        tensors = {name: {"shape": t.shape, "dtype": t.dtype} for name, t in one.index.tensors.items()}
        files = {name: record.bytes for name, record in one.manifest.files.items()}
        stamp = {"attempt": one.manifest.attempt, "time": one.manifest.time, "ranks": one.index.ranks}
        facts = one.facts.model_dump()
        _print_json(
            {"path": str(one.path), **stamp, "facts": facts, "layout": layout, "files": files, "tensors": tensors}
        )
        return
    print(f"{one.path}: {_size(one.bytes)}, saved {one.manifest.time} by attempt {one.manifest.attempt}")
    for name, value in one.facts.model_dump(exclude_none=True).items():
        print(f"  {name:<16} {value}")
    print(f"  {'ranks':<16} {one.index.ranks}")
    rows = [[group, f"{count[0]:,}", f"{count[1]:,}", f"{count[2]:,}"] for group, count in groups.items()]
    _print_table(("group", "tensors", "entries", "pieces"), rows)


@app.command()
def verify(run: Path = RUN, as_json: bool = JSON) -> None:
    """Read every byte of a run's checkpoints; exit code 1 if any differs from what was written."""
    from meshwright.checkpoint import Checkpoint, Damaged, checkpoints
    from meshwright.cli.output import stderr_console
    from meshwright.runs import RunFolder

    RunFolder.open(run)
    rows: list[dict[str, Any]] = []
    with stderr_console().status("reading") as status:
        for found in checkpoints(run):
            try:
                if isinstance(found, Damaged):
                    raise found
                status.update(f"reading step {found.facts.step}, {_size(found.bytes)}")
                found.verify()
                rows.append({"step": found.facts.step, "damage": None})
            except Damaged as damage:
                step = found.facts.step if isinstance(found, Checkpoint) else None
                rows.append({"step": step, "damage": str(damage)})
    sound = bool(rows) and all(row["damage"] is None for row in rows)
    if as_json:
        _print_json({"run": str(run), "ok": sound, "checkpoints": rows})
    else:
        for row in rows:
            print(f"step {row['step']}: intact" if row["damage"] is None else f"DAMAGED: {row['damage']}")
        if not rows:
            print(f"{run} has no checkpoints")
    if not sound:
        raise typer.Exit(1)


@app.command()
def diff(first: Path = ONE, second: Path = ONE, as_json: bool = JSON) -> None:
    """Compare two checkpoints tensor by tensor, whatever layouts saved them; exit code 1 if any bit differs."""
    from meshwright.checkpoint import differences, open_checkpoint

    one, other = open_checkpoint(first), open_checkpoint(second)
    with one, other:
        tensors = [{"name": name, "difference": report} for name, report in differences(one, other)]
    facts, others = one.facts.model_dump(), other.facts.model_dump()
    changed = {name: [facts[name], others[name]] for name in facts if repr(facts[name]) != repr(others[name])}
    if as_json:
        compared = len({*one.names(), *other.names()})
        _print_json({"equal": not tensors and not changed, "compared": compared, "facts": changed, "tensors": tensors})
    else:
        for name, pair in changed.items():
            print(f"{name}: {pair[0]} → {pair[1]}")
        for row in tensors:
            print(f"{row['name']}: {row['difference']}")
        if not tensors and not changed:
            print("bitwise equal")
    if tensors or changed:
        raise typer.Exit(1)


@app.command()
def prune(
    run: Path = RUN,
    keep_last: int = typer.Option(2, "--keep-last", min=1, help="Newest complete checkpoints to keep."),
    keep_every: int | None = typer.Option(
        None,
        "--keep-every",
        min=0,
        help="Keep multiples of this many steps too; by default of the job's checkpoint.keep_every, 0 keeps none.",
    ),
    damaged: bool = typer.Option(False, "--damaged", help="Also remove incomplete checkpoints."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print what would be removed."),
    as_json: bool = JSON,
) -> None:
    """Remove checkpoints that need not be kept; the newest intact one and those that the job's checkpoint.keep_every
    keeps for good stay."""
    from meshwright.checkpoint import remove, surplus
    from meshwright.errors import UserError
    from meshwright.runs import RunFolder

    folder = RunFolder.open(run)
    if keep_every is None:
        keep_every = folder.keep_every()
    paths = surplus(run, keep_last, keep_every, damaged=damaged, verify=True)
    if not dry_run:
        try:
            remove(paths)
        except OSError as error:
            report = f"{error.filename} cannot be removed ({error.strerror})"
            raise UserError(f"{report}; check that you have write permission for {run / 'checkpoints'}") from None
    if as_json:
        _print_json({"run": str(run), "dry_run": dry_run, "removed": [path.name for path in paths]})
        return
    for path in paths:
        print(f"{'would remove' if dry_run else 'removed'} {path}")
    if not paths:
        print("nothing to remove")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2f} MB"


def _print_json(value: Any) -> None:
    from meshwright.cli.output import print_json
    from meshwright.runs.folder import jsonable

    print_json(jsonable(value))


def _print_table(names: tuple[str, ...], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from meshwright.cli.output import stdout_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # no markup: a path may contain brackets
    stdout_console().print(table)
