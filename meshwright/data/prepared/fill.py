"""What fills a prepared folder: the input listed, numbered, tokenised unit by unit, and described in a manifest."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from meshwright.atomic import sync, write_atomic
from meshwright.data.files import read_json
from meshwright.data.join import write_joined
from meshwright.data.media.join import kept_text
from meshwright.data.prepared.folder import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    SPLITS,
    TOKENIZER,
    BadRecord,
    Content,
    Manifest,
    Shard,
)
from meshwright.data.prepared.shard import Work, finished_shard
from meshwright.data.prepared.workers import Counts, Half, count_documents, run_units, train_on
from meshwright.data.raw import Bad, BadDocuments, Inputs, MediaTaking, Taking, Unit, list_inputs, plan_units, read_unit
from meshwright.data.raw.inputs import identity_of
from meshwright.data.raw.media import is_medium
from meshwright.data.split import HeldOut, rule_for
from meshwright.data.store import token_dtype
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import UserError
from meshwright.job.fields import MediaField

_BAD, _NUMBERS = TypeAdapter(dict[str, BadRecord]), TypeAdapter(list[int])
MAX_BAD = 0.05
JUDGED_FROM = 1000
"""Documents to see before their bad share can stop the work early."""


@dataclass(frozen=True)
class Wishes:
    """What a prepared folder is to hold."""

    sources: tuple[str, ...]
    tokenizer: Path | None = None
    vocab_size: int = 32768
    """Of the tokenizer that is trained when none is given."""
    text_field: str = "text"
    content: Content = "text"
    chat_template: Path | None = None
    """What writes conversations as text; else the one beside the tokenizer."""
    join: str | None = None
    """A field: documents of the first source are followed by those of the others with the same value there."""
    validation_fraction: float = 0.01
    fields: Mapping[str, MediaField] = field(default_factory=dict)
    """Pictures, film and sound by name."""
    encoder: str | None = None
    """`file.py:Class` of the user's own."""
    check: str = "decode"
    """How items are checked."""
    max_bad: float = MAX_BAD
    """The share of bad documents above which the work stops."""


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    stage: str
    share: float
    counts: Counts


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Order:
    """Wishes with the tokenizer, the template and the files that they name."""

    wishes: Wishes
    given: Tokenizer | None
    taking: Taking
    inputs: Inputs
    others: Inputs | None
    """What is joined to the documents of the first source."""
    units: list[Unit]
    identity: str
    """A hash of the input as it was listed and of every setting that shapes the tokens."""


def order_for(wishes: Wishes, given: Tokenizer | None, taking: Taking, unit_bytes: int | None = None) -> Order:
    """List the input that is to be read with a tokenizer, or with one that is trained on it."""
    inputs = list_inputs(wishes.sources)
    if isinstance(taking, MediaTaking):  # items are listed by the samples they belong to
        inputs = replace(inputs, left_out=tuple(name for name in inputs.left_out if not is_medium(name)))
    others = list_inputs(wishes.sources[1:]) if wishes.join else None
    own = list_inputs(wishes.sources[:1]) if wishes.join else inputs
    units = plan_units(own.files, unit_bytes)
    return Order(wishes, given, taking, inputs, others, units, _identity(wishes, taking, inputs, units, given))


def fill(out: Path, order: Order, workers: int | None, report: Report) -> Manifest:
    """Write what was ordered into a folder that is this call's alone, its manifest last."""
    wishes, taking, units = order.wishes, order.taking, order.units
    workers = workers or available_cores()
    (out / PARTIAL).mkdir(exist_ok=True)
    joined, lost = (None, BadDocuments()) if order.others is None else _joined(out, order, order.others, report)
    tokenizer = _tokenizer(out, order, joined, report)
    for name, text in (taking.chat.files() if taking.chat is not None else {}).items():
        write_atomic(out / name, text, durable=True)
    firsts = _numbered(out, order, workers, report)
    held_out = rule_for(units, firsts, taking, wishes.validation_fraction)
    work = Work(out, taking, joined, held_out, firsts, tuple(file.name for file in order.inputs.files))
    shards = _all_shards(work, units, wishes.max_bad, workers, report)
    manifest = _manifest(order, held_out, tokenizer, shards, lost)
    tokens = manifest.source_tokens(len(wishes.sources))
    empty = [name for name, count in zip(wishes.sources, tokens, strict=True) if not (any(count) or wishes.join)]
    if empty or manifest.tokens["train"] == 0:
        shutil.rmtree(out / PARTIAL)
        names = ", ".join(empty or wishes.sources)
        raise UserError(f"{names} holds no text to train on; put some there or remove it from the list")
    write_atomic(out / MANIFEST, json.dumps(manifest.model_dump(), indent=1) + "\n", durable=True)
    return manifest


def available_cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _joined(out: Path, order: Order, others: Inputs, report: Report) -> tuple[Path, BadDocuments]:
    """The file of what is joined to the first source's documents, made once, and what of it could not be used."""
    path, told = out / PARTIAL / "joined.db", out / PARTIAL / "joined.json"
    if not told.is_file():
        report(Progress("joining", 0.0, Counts()))
        path.unlink(missing_ok=True)
        bad, good = BadDocuments(), 0
        before = len(order.inputs.files) - len(others.files)

        def records() -> Iterator[tuple[str, str]]:
            nonlocal good
            for unit in plan_units(others.files):
                for item in read_unit(unit, order.taking):
                    if isinstance(item, Bad):
                        bad.add(item.kind, item.place)
                    else:
                        assert item.key is not None
                        good += 1
                        yield item.key, kept_text(item, before) if isinstance(order.taking, MediaTaking) else item.text

        write_joined(path, records())
        _require_few(bad, good, order.wishes.max_bad)
        sync(path)
        write_atomic(told, json.dumps(bad.told()), durable=True)
    return path, BadDocuments(_BAD.validate_python(read_json(told)))


def _numbered(out: Path, order: Order, workers: int, report: Report) -> tuple[int, ...]:
    """The number of the first document of each unit, for which all but the last are read once.

    What lies behind an address is not fetched twice, nor are tars of pictures read twice: there every unit has numbers
    of its own.
    """
    units, path = order.units, out / PARTIAL / "numbers.json"
    if len(units) == 1 or order.wishes.validation_fraction == 0:
        return (0,) * len(units)
    if any(file.remote for file in order.inputs.files) or isinstance(order.taking, MediaTaking):
        return tuple(unit.number << 32 for unit in units)
    if not path.is_file():
        report(Progress("counting", 0.0, Counts()))
        counts, bad = [0] * len(units), BadDocuments()
        for number, documents, unusable in count_documents(units[:-1], order.taking, workers):
            counts[number + 1] = documents
            bad.merge(unusable)
            _require_few(bad, sum(counts), order.wishes.max_bad, judged_from=JUDGED_FROM)
        write_atomic(path, json.dumps(list(accumulate(counts))), durable=True)
    return tuple(_NUMBERS.validate_python(read_json(path)))


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
    if taking.pairs:
        told["pairs"] = True
    if isinstance(taking, MediaTaking):
        told["media"] = taking.identity()
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _tokenizer(out: Path, order: Order, joined: Path | None, report: Report) -> Tokenizer:
    path = out / TOKENIZER
    if order.given is not None:
        write_atomic(path, order.given.to_json(), durable=True)
    elif not path.is_file():
        report(Progress("tokenizer", 0.0, Counts()))
        write_atomic(path, train_on(order.units, order.taking, order.wishes.vocab_size, joined), durable=True)
    return load_tokenizer(path, str(path))


def _all_shards(work: Work, units: Sequence[Unit], max_bad: float, workers: int, report: Report) -> list[Shard]:
    shards: dict[int, Shard] = {}
    for unit in units:
        if (kept := finished_shard(work.out, unit.number)) is not None:
            shards[unit.number] = kept
    total = max(1, sum(unit.size_bytes for unit in units))
    before = Counts(
        read_bytes=sum(shard.input_bytes for shard in shards.values()),
        documents=_records_of(shards.values(), work.taking),
        bad=_bad_of(shards.values()).against_limit,
    )

    seen = before

    def follow(counts: Counts) -> bool:
        nonlocal seen
        seen = before + counts
        report(Progress("tokens", min(1.0, seen.read_bytes / total), seen))
        passed = seen.documents + seen.bad
        return passed < JUDGED_FROM or seen.bad <= max_bad * passed

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
    _require_one_format(units, ordered)
    _require_few(bad, _records_of(ordered, work.taking), max_bad)
    return ordered


def _records_of(shards: Iterable[Shard], taking: Taking) -> int:
    return sum(shard.train.documents + shard.validation.documents for shard in shards) // taking.documents_each


def _require_one_format(units: Sequence[Unit], shards: Sequence[Shard]) -> None:
    """Refuse a file whose units hold records of different formats; within a unit the reading refuses it."""
    names = {piece.number: piece.file.name for unit in units for piece in unit.pieces}
    seen: dict[int, str] = {}
    for shard in shards:
        for file, formats in shard.formats.items():
            for shape in formats:
                if seen.setdefault(file, shape) != shape:
                    raise UserError(
                        f"{names[file]} mixes two formats, {seen[file]} and {shape}; give each a file of its own, or "
                        "rewrite one as the other"
                    )


def _bad_of(shards: Iterable[Shard | Half]) -> BadDocuments:
    bad = BadDocuments()
    for shard in sorted(shards, key=lambda shard: shard.number):
        bad.merge(BadDocuments(shard.bad))
    return bad


def _require_few(bad: BadDocuments, good: int, max_bad: float, judged_from: int = 0) -> None:
    count, total = bad.against_limit, bad.against_limit + good
    if total >= judged_from and count > max_bad * total:
        raise _too_many(count, total, bad, max_bad)


def _too_many(count: int, total: int, bad: BadDocuments, max_bad: float) -> UserError:
    return UserError(
        f"{count} of {total} documents cannot be used ({bad.sentence()}), more than --max-bad {max_bad:g} allows; fix "
        "them, correct data.text_field or data.join (--text-field, --join), or run meshwright data prepare with a "
        "higher --max-bad"
    )


def _manifest(
    order: Order, held_out: HeldOut, tokenizer: Tokenizer, shards: Sequence[Shard], lost: BadDocuments
) -> Manifest:
    wishes, inputs = order.wishes, order.inputs
    bad = _bad_of(shards)
    bad.merge(lost)

    formats: Counter[str] = Counter()
    for shard in shards:
        for found in shard.formats.values():
            formats.update(found)

    def total(name: str) -> dict[str, int]:
        return {split: sum(getattr(shard.part(split), name) for shard in shards) for split in SPLITS}

    return Manifest(
        format=FORMAT,
        identity=order.identity,
        sources=[{"name": file.name, "bytes": file.size_bytes, "stamp": file.stamp} for file in inputs.files],
        left_out=list(inputs.left_out),
        text_field=wishes.text_field,
        content=wishes.content,
        formats=dict(sorted(formats.items())),
        join=wishes.join,
        fields=order.taking.shaping() if isinstance(order.taking, MediaTaking) else {},
        validation_fraction=wishes.validation_fraction,
        held_out="ends" if held_out.ends else "documents",
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
