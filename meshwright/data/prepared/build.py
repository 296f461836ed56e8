"""Sources to a prepared folder: units shared out among processes, finished ones kept over any interruption."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from meshwright.atomic import sync, write_atomic
from meshwright.data.chat import load_chat_template
from meshwright.data.files import read_json, read_text
from meshwright.data.join import write_joined
from meshwright.data.prepared.folder import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    SPLITS,
    TOKENIZER,
    BadRecord,
    Manifest,
    Shard,
    read_manifest,
)
from meshwright.data.prepared.shard import finished_shard
from meshwright.data.prepared.workers import Counts, Half, Work, run_units, train_on
from meshwright.data.raw import Bad, BadDocuments, Inputs, Taking, Unit, list_inputs, plan_units, read_unit
from meshwright.data.raw.inputs import identity_of
from meshwright.data.store import token_dtype
from meshwright.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer, load_tokenizer
from meshwright.errors import UserError

_PLAN = "plan.json"
_DYING_S = 3.0
"""Workers of a killed call hold its lock until they are gone too."""
_BAD = TypeAdapter(dict[str, BadRecord])
_JUDGED_FROM = 1000
"""Documents to see before their bad share can stop the work early."""


@dataclass(frozen=True)
class Wishes:
    """What a prepared folder is to hold."""

    sources: tuple[str, ...]
    tokenizer: Path | None = None
    vocab_size: int = 32768
    """Of the tokenizer that is trained when none is given."""
    text_field: str = "text"
    content: Literal["text", "conversations"] = "text"
    chat_template: Path | None = None
    """What writes conversations as text; else the one beside the tokenizer."""
    join: str | None = None
    """A field: documents of the first source are followed by those of the others with the same value there."""
    validation_fraction: float = 0.01
    max_bad: float = 0.05
    """The share of bad documents above which the work stops."""


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    stage: str
    share: float
    counts: Counts


Report = Callable[[Progress], None]


def build(
    wishes: Wishes,
    out: Path,
    workers: int | None = None,
    report: Report = lambda progress: None,
    *,
    unit_bytes: int | None = None,
) -> Manifest:
    """Prepare the sources into a folder, or finish what an interrupted call began there.

    The same wishes over the same input give the same bytes, whatever the number of workers and the interruptions.
    """
    given = _given_tokenizer(wishes)
    taking = _taking(wishes)
    inputs = list_inputs(wishes.sources)
    others = list_inputs(wishes.sources[1:]) if wishes.join else None
    own = list_inputs(wishes.sources[:1]) if wishes.join else inputs
    units = plan_units(own.files, unit_bytes)
    identity = _identity(wishes, taking, inputs, units, given)
    if (out / MANIFEST).is_file():
        return _already_there(out, identity)
    with _claimed(out, identity):
        joined, lost = (
            (None, BadDocuments()) if others is None else _joined(out, taking, others, wishes.max_bad, report)
        )
        tokenizer = _tokenizer(out, wishes, given, units, taking, joined, report)
        work = Work(out, taking, joined, wishes.validation_fraction)
        shards = _all_shards(work, units, wishes.max_bad, workers or available_cores(), report)
        manifest = _manifest(wishes, inputs, identity, tokenizer, shards, lost)
        if manifest.tokens["train"] == 0:
            shutil.rmtree(out / PARTIAL)
            raise UserError(f"{', '.join(wishes.sources)} gave no documents to train on; give sources that hold text")
        write_atomic(out / MANIFEST, json.dumps(manifest.model_dump(), indent=1) + "\n", durable=True)
    shutil.rmtree(out / PARTIAL)
    return manifest


def available_cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _given_tokenizer(wishes: Wishes) -> Tokenizer | None:
    if wishes.tokenizer is not None:
        return load_tokenizer(wishes.tokenizer.expanduser(), f"--tokenizer {wishes.tokenizer}")
    if wishes.vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"--vocab-size {wishes.vocab_size} is too small for a byte-level tokenizer; choose at least "
            f"{SMALLEST_VOCABULARY}, or give a --tokenizer of your own"
        )
    return None


def _taking(wishes: Wishes) -> Taking:
    if wishes.content == "text":
        if wishes.chat_template is not None:
            raise UserError(
                f"--chat-template {wishes.chat_template} writes conversations, not text; give --format conversations "
                "or leave it out"
            )
        if wishes.join is not None and len(wishes.sources) < 2:
            raise UserError(f"--join {wishes.join} needs two sources or more; name them or leave it out")
        return Taking(wishes.text_field, wishes.join)
    if wishes.join is not None:
        raise UserError(f"--join {wishes.join} makes one text of several and knows no conversations; leave one out")
    template = None if wishes.chat_template is None else str(wishes.chat_template)
    tokenizer = None if wishes.tokenizer is None else wishes.tokenizer.expanduser()
    return Taking(chat=load_chat_template(tokenizer, template, "--chat-template"))


def _joined(out: Path, taking: Taking, others: Inputs, max_bad: float, report: Report) -> tuple[Path, BadDocuments]:
    """The file of what is joined to the first source's documents, made once, and what of it could not be used."""
    path, told = out / PARTIAL / "joined.db", out / PARTIAL / "joined.json"
    if not told.is_file():
        report(Progress("joining", 0.0, Counts()))
        path.unlink(missing_ok=True)
        bad, good = BadDocuments(), 0

        def records() -> Iterator[tuple[str, str]]:
            nonlocal good
            for unit in plan_units(others.files):
                for item in read_unit(unit, taking):
                    if isinstance(item, Bad):
                        bad.add(item.kind, item.place)
                    else:
                        assert item.key is not None
                        good += 1
                        yield item.key, item.text

        write_joined(path, records())
        if bad.count > max_bad * (bad.count + good):
            raise _too_many(bad.count, bad.count + good, bad, max_bad)
        sync(path)
        write_atomic(told, json.dumps(bad.told()), durable=True)
    return path, BadDocuments(_BAD.validate_python(read_json(told)))


def _identity(wishes: Wishes, taking: Taking, inputs: Inputs, units: Sequence[Unit], given: Tokenizer | None) -> str:
    told: dict[str, Any] = {
        "format": FORMAT,
        "files": list(identity_of(inputs.files)),
        "units": [[[piece.number, piece.start, piece.stop] for piece in unit.pieces] for unit in units],
        "tokenizer": given.fingerprint() if given else wishes.vocab_size,
        "text_field": wishes.text_field,
        "validation_fraction": wishes.validation_fraction,
    }
    if taking.key_field is not None:
        told["join"] = taking.key_field
    if taking.chat is not None:
        told["chat"] = taking.chat.fingerprint
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _already_there(out: Path, identity: str) -> Manifest:
    manifest = read_manifest(out)
    if manifest.identity != identity:
        raise UserError(
            f"--out {out} holds tokens of other sources, another tokenizer or other settings; choose another folder "
            "or delete this one"
        )
    shutil.rmtree(out / PARTIAL, ignore_errors=True)  # of a call that was killed at its very end
    return manifest


@contextmanager
def _claimed(out: Path, identity: str) -> Iterator[None]:
    """The folder for this call alone; one in which nothing was finished is not left behind."""
    partial, plan = out / PARTIAL, out / PARTIAL / _PLAN
    made = not out.exists()
    if not made and (not out.is_dir() or (any(out.iterdir()) and not partial.is_dir())):
        raise UserError(f"--out {out} exists and is not a prepared folder; choose another")
    if plan.is_file() and read_text(plan) != identity:
        raise UserError(
            f"--out {out} holds an unfinished preparation of other sources, another tokenizer or other settings; "
            "choose another folder or delete this one"
        )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "lock").open("ab") as lock:
            _lock(lock.fileno(), out)
            for left in partial.glob("unit-*"):
                shutil.rmtree(left)
            write_atomic(plan, identity, durable=True)
            yield
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        if not (out / MANIFEST).is_file() and not any(partial.glob("[0-9]*.json")):
            shutil.rmtree(partial, ignore_errors=True)
            (out / TOKENIZER).unlink(missing_ok=True)
            with suppress(OSError):
                if made:
                    out.rmdir()


def _lock(descriptor: int, out: Path) -> None:
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--out {out} is being prepared by another process; wait for it or choose another"
                ) from error
            time.sleep(0.05)
        except OSError:
            return  # some file systems have no locks


def _tokenizer(
    out: Path,
    wishes: Wishes,
    given: Tokenizer | None,
    units: Sequence[Unit],
    taking: Taking,
    joined: Path | None,
    report: Report,
) -> Tokenizer:
    path = out / TOKENIZER
    if given is not None:
        write_atomic(path, given.to_json(), durable=True)
    elif not path.is_file():
        report(Progress("tokenizer", 0.0, Counts()))
        write_atomic(path, train_on(units, taking, wishes.vocab_size, joined), durable=True)
    return load_tokenizer(path, str(path))


def _all_shards(work: Work, units: Sequence[Unit], max_bad: float, workers: int, report: Report) -> list[Shard]:
    shards: dict[int, Shard] = {}
    for unit in units:
        if (kept := finished_shard(work.out, unit.number)) is not None:
            shards[unit.number] = kept
    total = max(1, sum(unit.size_bytes for unit in units))
    before = Counts(
        read_bytes=sum(shard.input_bytes for shard in shards.values()),
        documents=sum(shard.train.documents + shard.validation.documents for shard in shards.values()),
        bad=_bad_of(shards.values()).count,
    )

    seen = before

    def follow(counts: Counts) -> bool:
        nonlocal seen
        seen = before + counts
        report(Progress("tokens", min(1.0, seen.read_bytes / total), seen))
        passed = seen.documents + seen.bad
        return passed < _JUDGED_FROM or seen.bad <= max_bad * passed

    halves: list[Half] = []
    for made in run_units(work, [unit for unit in units if unit.number not in shards], workers, follow):
        if isinstance(made, Half):
            halves.append(made)
        else:
            shards[made.number] = made
    bad = _bad_of([*shards.values(), *halves])
    if len(shards) < len(units):
        raise _too_many(seen.bad, seen.bad + seen.documents, bad, max_bad)
    ordered = [shards[unit.number] for unit in units]
    documents = sum(shard.train.documents + shard.validation.documents for shard in ordered)
    if bad.count > max_bad * (bad.count + documents):
        raise _too_many(bad.count, bad.count + documents, bad, max_bad)
    return ordered


def _bad_of(shards: Iterable[Shard | Half]) -> BadDocuments:
    bad = BadDocuments()
    for shard in sorted(shards, key=lambda shard: shard.number):
        bad.merge(BadDocuments(shard.bad))
    return bad


def _too_many(count: int, total: int, bad: BadDocuments, max_bad: float) -> UserError:
    return UserError(
        f"{count} of {total} documents cannot be used ({bad.sentence()}), more than --max-bad {max_bad:g} allows; mend "
        "them, correct --text-field or --join, or raise --max-bad: finished shards are kept"
    )


def _manifest(
    wishes: Wishes,
    inputs: Inputs,
    identity: str,
    tokenizer: Tokenizer,
    shards: Sequence[Shard],
    lost: BadDocuments,
) -> Manifest:
    bad = _bad_of(shards)
    bad.merge(lost)

    def total(field: str) -> dict[str, int]:
        return {split: sum(getattr(shard.part(split), field) for shard in shards) for split in SPLITS}

    return Manifest(
        format=FORMAT,
        identity=identity,
        sources=[{"name": file.name, "bytes": file.size_bytes, "stamp": file.stamp} for file in inputs.files],
        left_out=list(inputs.left_out),
        text_field=wishes.text_field,
        content=wishes.content,
        join=wishes.join,
        validation_fraction=wishes.validation_fraction,
        dtype=token_dtype(tokenizer.vocab_size).str,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer_sha256=tokenizer.fingerprint(),
        tokens=total("tokens"),
        documents=total("documents"),
        text_bytes=total("text_bytes"),
        bad=bad.told(),
        shards=list(shards),
    )


def _unwritable(out: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"--out {out}: the disk or quota is full; free some and run the same command again: finished shards are "
            "kept"
        )
    return UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder you may write to")
