"""A prepared folder looked at: what is in it, some of it as text, and whether every byte is as it was written."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.counted import TextPart, counted_text
from meshwright.data.hashing import mix
from meshwright.data.prepared.folder import SPLITS, TOKENIZER, Manifest, Prepared, open_prepared, read_manifest
from meshwright.data.prepared.shard import sha256_of
from meshwright.data.store import Int64Array
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError

_SAMPLE_TOKENS = {"text": 200, "conversations": 1000, "preferences": 1000}
_SAMPLES = {"text": 0, "conversations": 1, "preferences": 2}
_SAMPLING = 0x5A_3B_1E
_SHARD = re.compile(rf"(?:{'|'.join(SPLITS)})-\d{{5}}\.")


@dataclass(frozen=True)
class Sampled:
    """A document as text, its first tokens at least."""

    number: int
    tokens: int
    text: str
    loss_tokens: int
    """Those of the whole document that count in the loss."""
    parts: list[TextPart]
    """The text by what counts in the loss."""


@dataclass(frozen=True)
class Look:
    """What a look at a folder shows."""

    manifest: Manifest
    histogram: list[tuple[int, int]]
    """Documents by length: (tokens at most, documents), the limits powers of two."""
    longest: int
    median: int
    """An upper limit of it: the histogram's."""
    samples: list[Sampled]


@dataclass(frozen=True)
class Findings:
    """What verification found."""

    files: int
    bytes: int
    damages: list[str]


def inspect(folder: Path, samples: int | None = None) -> Look:
    """Counts, document lengths, and some documents of the training split decoded, the same ones each time; by default
    none, one conversation, or two answers of pairs."""
    prepared = open_prepared(folder)
    if samples is None:
        samples = _SAMPLES[prepared.manifest.content]
    counts: dict[int, int] = {}
    longest = 0
    total = prepared.manifest.documents["train"]
    wanted = {mix(number, _SAMPLING) % total for number in range(2 * samples)} if total else set()
    chosen = sorted(wanted)[:: max(1, len(wanted) // samples)][:samples] if samples else []
    found: list[Sampled] = []
    seen = 0
    for starts, lengths in _documents(prepared):
        longest = max(longest, int(lengths.max(initial=0)))
        for bits, count in zip(*np.unique(_bits(lengths), return_counts=True), strict=True):
            counts[int(bits)] = counts.get(int(bits), 0) + int(count)
        for number in chosen:
            if seen <= number < seen + len(starts):
                found.append(_sample(prepared, number, int(starts[number - seen]), int(lengths[number - seen])))
        seen += len(starts)
    histogram = [(1 << bits, counts[bits]) for bits in sorted(counts)]
    return Look(prepared.manifest, histogram, longest, _median(histogram, seen), found)


def verify(folder: Path, follow: Callable[[int, int], None] = lambda done, total: None) -> Findings:
    """Read every byte and compare it with the manifest; follow(bytes done, of all) hears of it."""
    manifest = read_manifest(folder)
    records = {n: r for shard in manifest.shards for split in SPLITS for n, r in shard.part(split).files.items()}
    total = sum(record.bytes for record in records.values())
    done = 0
    damages = []
    for name, record in records.items():
        path = folder / name
        try:
            if path.stat().st_size != record.bytes:
                damages.append(f"{name} has {path.stat().st_size} bytes where {record.bytes} were written")
            elif sha256_of(path) != record.sha256:
                damages.append(f"{name} is not as it was written (another sha256)")
        except OSError as error:
            damages.append(f"{name} cannot be read ({error.strerror})")
        done += record.bytes
        follow(done, total)
    damages += _tokenizer_damage(folder, manifest)
    damages += [
        f"{path.name} is not in the manifest"
        for path in sorted(folder.iterdir())
        if _SHARD.match(path.name) and path.name not in records
    ]
    return Findings(len(records), done, damages)


def _tokenizer_damage(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        if load_tokenizer(folder / TOKENIZER, str(folder / TOKENIZER)).fingerprint() != manifest.tokenizer_sha256:
            yield f"{TOKENIZER} is not the tokenizer that made the tokens"
    except UserError as error:
        yield str(error)


def _documents(prepared: Prepared) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Starts in the training split and lengths of the documents, a shard at a time."""
    offset = 0
    store = prepared.store("train")
    for number, part in enumerate(store.parts):
        starts = part.starts_between(0, len(part))
        # The last document of a shard may go on in later ones.
        end = offset + len(part)
        following = (later.starts_between(0, len(later))[:1] for later in store.parts[number + 1 :])
        later_offset = end
        for first, later in zip(following, store.parts[number + 1 :], strict=True):
            if len(first):
                end = later_offset + int(first[0])
                break
            later_offset += len(later)
            end = later_offset
        yield starts + offset, np.diff(np.append(starts + offset, end))
        offset += len(part)


def _bits(lengths: Int64Array) -> Int64Array:
    """The power of two at or above each length."""
    return np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)


def _median(histogram: list[tuple[int, int]], total: int) -> int:
    seen = 0
    for limit, count in histogram:
        seen += count
        if 2 * seen >= total:
            return limit
    return 0


def _sample(prepared: Prepared, number: int, start: int, length: int) -> Sampled:
    most = _SAMPLE_TOKENS[prepared.manifest.content]
    found = counted_text(prepared.store("train"), prepared.tokenizer, start, start + length, most)
    text = "".join(part.text for part in found.parts)
    return Sampled(number, length, text, found.loss_tokens, found.parts)
