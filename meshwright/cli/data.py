"""`meshwright data`: prepare text from any source for training, inspect it and check it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.job import JSON

if TYPE_CHECKING:
    from meshwright.data.prepared import Manifest, Progress, Sampled, Wishes


class Content(enum.Enum):
    """What the documents are."""

    text = "text"
    conversations = "conversations"
    preferences = "preferences"
    webdataset = "webdataset"


app = typer.Typer(help="Prepare text for training, inspect and verify what was prepared.", no_args_is_help=True)

SOURCES = typer.Argument(
    help="Files, folders, patterns or addresses (s3://…, https://…), builtin:stdlib, or NAME:ARGUMENT of your own."
)
FOLDER = typer.Argument(help="A prepared folder.")
TOKENIZER = typer.Option(None, "--tokenizer", help="A tokenizer.json; by default a BPE is trained on the sources.")
FORMAT = typer.Option(
    "text",
    "--format",
    help="What a record holds: a text, a conversation, or a preferred and a rejected answer; or webdataset, to write "
    "samples with pictures as tars that Energon reads.",
)
TEMPLATE = typer.Option(None, "--chat-template", help="A Jinja file; by default the one in the tokenizer's folder.")
JOIN = typer.Option(
    None, "--join", help="A field: documents of the other sources follow the first source's with the same value."
)
WORKERS = typer.Option(None, "--workers", min=1, help="Processes; by default one per CPU core.")
MAX_BAD = typer.Option(0.05, "--max-bad", min=0.0, max=1.0, help="Stop if more than this fraction is unusable.")
SAMPLE = typer.Option(
    None,
    "--sample",
    min=0,
    help="Documents to decode and show; by default 1 of conversations, 2 of preferences, else none.",
)
FIELDS = typer.Option(
    None, "--fields", help="A job whose [data.fields] describe the pictures, film and sound of a record."
)
HELD_OUT = typer.Option(0.01, "--validation-fraction", min=0.0, max=0.5, help="Fraction of the documents held out.")


@app.command()
def prepare(
    sources: list[str] = SOURCES,
    out: Path = typer.Option(..., "--out", help="The folder to create."),
    tokenizer: Path | None = TOKENIZER,
    vocab_size: int = typer.Option(32768, "--vocab-size", min=1, help="Vocabulary size of the trained tokenizer."),
    text_field: str = typer.Option("text", "--text-field", help="The field or column that holds the text."),
    content: Content = FORMAT,
    chat_template: Path | None = TEMPLATE,
    join: str | None = JOIN,
    fields: str | None = FIELDS,
    validation_fraction: float = HELD_OUT,
    workers: int | None = WORKERS,
    max_bad: float = MAX_BAD,
    as_json: bool = JSON,
) -> None:
    """Turn sources into token shards; if killed, the same command continues where it stopped."""
    from meshwright.cli.output import print_json
    from meshwright.data.prepared import Wishes, build
    from meshwright.job import load_job
    from meshwright.job.data import Data

    described = Data() if fields is None else load_job(fields).job.data
    wishes = Wishes(
        tuple(sources),
        tokenizer,
        vocab_size,
        text_field,
        "text" if content is Content.webdataset else content.value,
        chat_template,
        join,
        validation_fraction,
        described.fields,
        described.encoder,
        described.check,
        max_bad,
    )
    if content is Content.webdataset:
        _export(wishes, out, as_json)
        return
    started = time.perf_counter()
    with _followed() as (report, last):
        manifest = build(wishes, out, workers, report)
    if as_json:
        said = last()
        retries = said.counts.retries if said else 0
        print_json(
            {"folder": str(out), **_summary(manifest), "seconds": time.perf_counter() - started, "retries": retries}
        )
        return
    _print_summary(out, manifest)


def _export(wishes: Wishes, out: Path, as_json: bool) -> None:
    """Samples as tars, and what is to be said of them."""
    from meshwright.cli.output import print_json, stderr_console
    from meshwright.data.prepared import export_webdataset

    with stderr_console().status("writing shards"):
        written = export_webdataset(wishes, out)
    if as_json:
        counts = {"samples": written.samples, "shards": written.shards, "bad": written.bad.told()}
        print_json({"folder": str(out), **counts})
        return
    print(f"{out}: {written.samples['train']:,} samples for train, {written.samples['val']:,} for val", end="")
    print(f" in {written.shards} shards, with .nv-meta for Energon")
    for kind, entry in written.bad.told().items():
        print(f"  {entry['count']:,} bad: {kind}, first at {', '.join(entry['first'])}")


@app.command()
def inspect(
    folder: Path = FOLDER,
    sample: int | None = SAMPLE,
    as_json: bool = JSON,
) -> None:
    """Show what a prepared folder contains: documents, tokens, lengths, and some texts with what counts in the loss."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json
    from meshwright.data.prepared import inspect as look_into

    look = look_into(folder, sample)
    if as_json:
        samples = [asdict(one) | {"parts": [part._asdict() for part in one.parts]} for one in look.samples]
        lengths = [{"at_most": limit, "documents": count} for limit, count in look.histogram]
        more = {"lengths": lengths, "longest": look.longest, "samples": samples}
        print_json({"folder": str(folder), **_summary(look.manifest), **more})
        return
    _print_summary(folder, look.manifest)
    most = max((count for _, count in look.histogram), default=1)
    print(f"  document lengths in tokens (longest {look.longest:,}):")
    for limit, count in look.histogram:
        print(f"    up to {limit:>9,}  {count:>12,}  {'█' * max(1, round(40 * count / most))}")
    _print_samples(look.samples)


def _print_samples(samples: list[Sampled]) -> None:
    """Documents with what counts in the loss in another colour, or in brackets where there are no colours."""
    from rich.text import Text

    from meshwright.cli.output import harmless, stdout_console

    console = stdout_console()
    coloured = console.is_terminal and not console.no_color
    if any(one.loss_tokens < one.tokens for one in samples):
        how = "green" if coloured else "between ⟦ and ⟧"
        print(f"  what counts in the loss is {how}")
    for one in samples:
        counted = "" if one.loss_tokens == one.tokens else f", {one.loss_tokens:,} count in the loss"
        console.rule(f"document {one.number}, {one.tokens:,} tokens{counted}", align="left")
        text = Text()
        for part in one.parts:
            marked = part.counts and bool(counted)
            shown = harmless(part.text)
            if marked and not coloured:
                shown = f"⟦{shown}⟧"
            text.append(shown, style="bold green" if marked else "")
        console.print(text, soft_wrap=True)


@app.command()
def verify(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """Read every byte of a prepared folder; exit code 1 if it differs from what was written."""
    from meshwright.cli.output import print_json, stderr_console
    from meshwright.data.prepared import verify as check

    with stderr_console().status("reading") as status:
        found = check(folder, lambda done, total: status.update(f"reading {done / max(1, total):.0%}"))
    if as_json:
        message = {"files": found.files, "bytes": found.bytes, "damages": found.damages}
        print_json({"folder": str(folder), "ok": not found.damages, **message})
    else:
        for damage in found.damages:
            print(f"DAMAGED: {damage}")
        if not found.damages:
            print(f"{folder}: {found.files} files, {found.bytes:,} bytes, all intact")
    if found.damages:
        raise typer.Exit(1)


_STAGES = {
    "joining": "joining the sources",
    "tokenizer": "training a tokenizer",
    "counting": "counting the documents",
}


@contextmanager
def _followed() -> Iterator[tuple[Callable[[Progress], None], Callable[[], Progress | None]]]:
    """A progress line on the terminal, and its last state."""
    from meshwright.cli.output import stderr_console

    started = time.perf_counter()
    heard: list[Progress] = []
    with stderr_console().status("listing the sources") as status:

        def report(progress: Progress) -> None:
            heard[:] = [progress]
            counts = progress.counts
            if progress.stage != "tokens":
                status.update(_STAGES[progress.stage])
                return
            rate = counts.read_bytes / max(1e-9, time.perf_counter() - started) / 1e6
            parts = [f"tokens {progress.share:.0%}", f"{counts.documents:,} documents", f"{rate:.1f} MB/s"]
            parts += [f"{counts.bad:,} bad"] if counts.bad else []
            parts += [f"{counts.retries:,} retries"] if counts.retries else []
            status.update(" · ".join(parts))

        yield report, lambda: heard[0] if heard else None


def _summary(manifest: Manifest) -> dict[str, object]:
    names = (
        "tokens",
        "documents",
        "text_bytes",
        "vocab_size",
        "tokenizer_sha256",
        "bad",
        "left_out",
        "identity",
        "content",
        "formats",
    )
    message = manifest.model_dump(include=set(names))
    return {**{name: message[name] for name in names}, "shards": len(manifest.shards), "files": len(manifest.sources)}


def _print_summary(folder: Path, manifest: Manifest) -> None:
    from meshwright.data.prepared import open_prepared

    what = {"text": "documents", "preferences": "pairs"}.get(manifest.content, manifest.content)
    for split in ("train", "validation"):
        documents = manifest.documents[split] // (2 if manifest.content == "preferences" else 1)
        tokens = manifest.tokens[split]
        per = f", {manifest.text_bytes[split] / tokens:.2f} bytes per token" if tokens else ""
        head = f"{folder}: " if split == "train" else " " * (len(str(folder)) + 2)
        print(f"{head}{tokens:,} tokens of {documents:,} {what} for {split}{per}")
    print(f"  {len(manifest.shards)} shards from {len(manifest.sources)} files, vocabulary of {manifest.vocab_size:,}")
    if manifest.fields:
        prepared = open_prepared(folder)
        print(f"  items: {', '.join(f'{count:,} {name}' for name, count in prepared.counted().items())}")
        for sentence in prepared.missing():
            print(f"  {sentence}")
    if manifest.formats:
        found = ", ".join(f"{shape} ({count:,})" for shape, count in manifest.formats.items())
        print(f"  recognised: {found}")
    for kind, entry in manifest.bad.items():
        print(f"  {entry['count']:,} bad: {kind}, first at {', '.join(entry['first'])}")
    if manifest.left_out:
        why = "of no known kind or of another split"
        print(f"  {len(manifest.left_out)} files left out, {why}, first {manifest.left_out[0]}")
