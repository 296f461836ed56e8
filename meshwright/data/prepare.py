"""From sources to a corpus: tokenise once, keep the tokens in the cache, find them there the next time."""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from meshwright.atomic import sync
from meshwright.data.cache import MANIFEST, building, cache_root, sweep
from meshwright.data.chat import ChatTemplate, load_chat_template
from meshwright.data.corpus import Corpus
from meshwright.data.files import read_json
from meshwright.data.grouping import grouped_by_size
from meshwright.data.hashing import fraction_of
from meshwright.data.join import joined
from meshwright.data.prepared.folder import Prepared, ShardedTokens, is_prepared, open_prepared
from meshwright.data.sources import SYNTHETIC, Document, Source, iterate_documents, list_sources
from meshwright.data.split import SplitWriter, splits_by_document
from meshwright.data.store import FileTokens, SyntheticTokens, load_index, token_dtype
from meshwright.data.tokenizer import LARGEST_VOCABULARY, Tokenizer, load_tokenizer, train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

FORMAT = 2
TOKENIZER = "tokenizer.json"
# More text hardly changes the merges of a tokenizer; this much keeps the first run of a demo short.
TRAINING_BYTES = 20_000_000
_SAMPLING_KEY = 0x70_4B_E2
_BATCH_BYTES = 4_000_000
"""Enough documents for every processor core, and few enough for memory."""

_SPLITS: tuple[Literal["train"], Literal["validation"]] = ("train", "validation")

Report = Callable[[str, float], None]
Read = Callable[[Sequence[Source]], Iterator[Document]]


def prepare(data: Data, vocab_size: int, report: Report | None = None, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of a job's data section, tokenised now or taken from the cache; report(stage, fraction) follows it.

    A tokenizer that is given stands in the place of the section's own.
    """
    if SYNTHETIC in data.sources:
        return _synthetic(data, vocab_size)
    if any(is_prepared(name) for name in data.sources):
        return _prepared(data, vocab_size)
    sources = list_sources(data.sources)
    given = tokenizer or _given_tokenizer(data.tokenizer, vocab_size)
    chat = _chat_template(data)
    root = cache_root(data.cache)
    folder = root / f"tokens-{_key(data, sources, vocab_size, given, chat)}"
    sweep(root)
    if not _is_complete(folder):
        try:
            with building(folder, _is_complete) as draft:
                with _reading(data, sources, chat, root) as (read, apart):
                    used = given or train_tokenizer(_training_texts(apart, read, report), vocab_size)
                    _write(draft, data, apart, read, used, report)
                if _state(list_sources(data.sources)) != _state(sources):
                    raise UserError(
                        "data.sources changed while it was read; start again when nothing writes to it any more"
                    )
        except OSError as error:
            raise _unwritable(error, root, sources, vocab_size) from error
    return _open(folder)


def _synthetic(data: Data, vocab_size: int) -> Corpus:
    if len(data.sources) > 1:
        raise UserError(
            f"data.sources mixes {SYNTHETIC} with {len(data.sources) - 1} other; leave it alone in the list"
        )
    endless = SyntheticTokens(vocab_size, key=0)
    apart = SyntheticTokens(vocab_size, key=2, count=len(endless) if data.validation_fraction else 0)
    return Corpus(None, endless, apart, None)


def _prepared(data: Data, vocab_size: int) -> Corpus:
    """Folders that `meshwright data prepare` made, one behind the other; the tokenizer is theirs."""
    for field, value in (("join", data.join), ("chat_template", data.chat_template)):
        if value is not None:
            raise UserError(
                f'data.{field} = "{value}" is for files, and prepared folders are made with it '
                f"(meshwright data prepare --{field.replace('_', '-')}); leave it out"
            )
    folders = []
    for name in data.sources:
        if not is_prepared(name):
            raise UserError(f"data.sources mixes prepared folders with {name}; prepare that too, or leave it out")
        folders.append(open_prepared(Path(name).expanduser()))
    first = folders[0]
    for folder in folders:
        if folder.manifest.content != data.format:
            raise UserError(
                f'data.format = "{data.format}" does not fit {folder.folder}, which holds {folder.manifest.content}; '
                f'set it to "{folder.manifest.content}" or name other data.sources'
            )
    for other in folders[1:]:
        if other.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise UserError(
                f"data.sources: {other.folder} was prepared with another tokenizer than {first.folder}; prepare one of "
                "them again with the other's tokenizer.json"
            )
    require_tokenizer(first, data.tokenizer, vocab_size)
    train, validation = (
        ShardedTokens([part for folder in folders for part in folder.store(split).parts])
        for split in ("train", "validation")
    )
    bounds = tuple(accumulate((len(folder.store("train")) for folder in folders), initial=0))
    # What is derived from the tokens is kept beside them; beside which of several, nobody could say.
    alone = len(folders) == 1
    return Corpus(first.tokenizer, train, validation, first.folder if alone else None, () if alone else bounds)


def require_tokenizer(prepared: Prepared, tokenizer: str | None, vocab_size: int) -> None:
    """Refuse a tokenizer that did not make the tokens, and a model too small for them."""
    if tokenizer is not None:
        given = load_tokenizer(Path(tokenizer).expanduser())
        if given.fingerprint() != prepared.manifest.tokenizer_sha256:
            raise UserError(
                f"data.tokenizer = {tokenizer} is not the one {prepared.folder} was prepared with; leave it out, or "
                "prepare the folder again with it"
            )
    if prepared.manifest.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size = {vocab_size} is smaller than the {prepared.manifest.vocab_size} entries of the "
            f"tokenizer {prepared.folder} was prepared with; set it to at least {prepared.manifest.vocab_size}"
        )


def _given_tokenizer(name: str | None, vocab_size: int) -> Tokenizer | None:
    if name is None:
        return None
    path = Path(name).expanduser()
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer = {path} has {tokenizer.vocab_size} entries but model.vocab_size = {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _chat_template(data: Data) -> ChatTemplate | None:
    if data.format == "text":
        return None
    tokenizer = None if data.tokenizer is None else Path(data.tokenizer).expanduser()
    return load_chat_template(tokenizer, data.chat_template)


def _key(
    data: Data, sources: Sequence[Source], vocab_size: int, given: Tokenizer | None, chat: ChatTemplate | None
) -> str:
    """A name for exactly this preparation: anything that would change the tokens changes it."""
    identity = {
        "format": FORMAT,
        "files": _state(sources),
        "text_field": data.text_field,
        "join": data.join,
        "tokenizer": given.fingerprint() if given else vocab_size,
        "validation_fraction": data.validation_fraction,
        "chat": None if chat is None else chat.fingerprint,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]


def _state(sources: Sequence[Source]) -> list[list[str | int]]:
    return [[str(file.path), file.size_bytes, file.modified_ns] for source in sources for file in source.files]


@contextmanager
def _reading(
    data: Data, sources: Sequence[Source], chat: ChatTemplate | None, root: Path
) -> Iterator[tuple[Read, Sequence[Source]]]:
    """How documents are read, and the sources that they are read from: joined ones are one."""
    if data.join is None:
        yield partial(iterate_documents, text_field=data.text_field, chat=chat), sources
    else:
        with joined(sources, data.text_field, data.join, root) as table:
            yield table.documents, sources[:1]


def _training_texts(sources: Sequence[Source], read: Read, report: Report | None) -> Iterator[str]:
    """A fixed sample of the documents, at most TRAINING_BYTES of them."""
    total = sum(source.size_bytes for source in sources)
    taken = 0
    for number, document in enumerate(read(sources)):
        if taken and fraction_of(number, _SAMPLING_KEY) >= TRAINING_BYTES / total:
            continue
        yield document.text
        taken += document.source_bytes
        if report:
            report("tokenizer", min(1.0, taken / min(total, TRAINING_BYTES)))
        if taken >= TRAINING_BYTES:
            return


def _write(
    folder: Path,
    data: Data,
    sources: Sequence[Source],
    read: Read,
    tokenizer: Tokenizer,
    report: Report | None,
) -> None:
    fraction, marked = data.validation_fraction, data.format == "conversations"
    # The end of a conversation without its beginning would be no test of anything.
    by_document = marked or fraction == 0 or splits_by_document(read(sources), fraction)
    dtype = token_dtype(tokenizer.vocab_size)
    total = sum(source.size_bytes for source in sources)
    done = 0
    bounds = [0]
    with SplitWriter(folder, dtype, tokenizer.end_of_text, fraction, by_document=by_document, marked=marked) as writer:
        for source in sources:
            for batch in grouped_by_size(read([source]), lambda document: document.source_bytes, _BATCH_BYTES):
                _add(writer, tokenizer, batch)
                done += sum(document.source_bytes for document in batch)
                if report:
                    report("tokens", done / total)
            bounds.append(writer.train.count)
        writer.finish()
    tokenizer.save(folder / TOKENIZER)
    manifest = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokens": {"train": writer.train.count, "validation": writer.validation.count},
        "documents": {"train": writer.train.documents, "validation": writer.validation.documents},
        "source_bounds": bounds,
        "content": data.format,
        "split": "documents" if by_document else "end of each document",
        "sources": [{"name": s.name, "files": len(s.files), "bytes": s.size_bytes} for s in sources],
        "text_field": data.text_field,
        "validation_fraction": fraction,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_sha256": tokenizer.fingerprint(),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync(folder / TOKENIZER)
    sync(folder / MANIFEST)


def _add(writer: SplitWriter, tokenizer: Tokenizer, batch: Sequence[Document]) -> None:
    texts = [document.text for document in batch]
    marks = [document.marks for document in batch if document.marks is not None]
    if marks:
        for text, spans, (tokens, targets) in zip(texts, marks, tokenizer.encode_marked(texts, marks), strict=True):
            writer.add_marked(tokens, targets, end_counts=spans[-1][1] > len(text))
    else:
        for document, tokens in zip(batch, tokenizer.encode_batch(texts), strict=True):
            writer.add(tokens, last_piece=document.last_piece)


class _Manifest(BaseModel):
    """What is needed of a manifest to open its folder."""

    format: Literal[2]
    dtype: Literal["<u2", "<u4"]
    tokens: dict[Literal["train", "validation"], Annotated[int, Field(ge=0, lt=1 << 48)]]
    source_bounds: list[Annotated[int, Field(ge=0)]]
    content: Literal["text", "conversations"]
    vocab_size: int = Field(gt=0, le=LARGEST_VOCABULARY)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        bounds = self.source_bounds
        whole = bounds == sorted(bounds) and bounds[:1] == [0] and bounds[-1:] == [self.tokens.get("train")]
        if len(self.tokens) != 2 or not whole or self.dtype != token_dtype(self.vocab_size).str:
            raise ValueError("the numbers of tokens do not fit together")
        return self


def _is_complete(folder: Path) -> bool:
    """Whether the folder is there with every file of the size its manifest states."""
    return _read_manifest(folder) is not None


def _read_manifest(folder: Path) -> _Manifest | None:
    try:
        manifest = _Manifest.model_validate(read_json(folder / MANIFEST))
        itemsize = np.dtype(manifest.dtype).itemsize
        for split, count in manifest.tokens.items():
            if (folder / f"{split}.bin").stat().st_size != count * itemsize:
                return None
            load_index(folder / f"{split}.documents.npy")
        load_tokenizer(folder / TOKENIZER)
    except (OSError, ValueError, UserError):
        return None
    return manifest


def _open(folder: Path) -> Corpus:
    manifest = _read_manifest(folder)
    if manifest is None:
        raise UserError(f"data.cache: {folder} was damaged since it was prepared; start again, and it is made anew")
    marked = manifest.content == "conversations"
    train, validation = (
        FileTokens(folder, split, manifest.tokens[split], manifest.dtype, manifest.vocab_size, has_targets=marked)
        for split in _SPLITS
    )
    return Corpus(load_tokenizer(folder / TOKENIZER), train, validation, folder, tuple(manifest.source_bounds))


def _unwritable(error: OSError, root: Path, sources: Sequence[Source], vocab_size: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # A token stands for at least a byte of the source.
        needed = sum(source.size_bytes for source in sources) * token_dtype(vocab_size).itemsize
        return UserError(
            f"data.cache: the disk or quota of {root} is full, and preparing needs up to {needed} bytes there; "
            "free some, or set data.cache to a folder on another disk"
        )
    return UserError(
        f"data.cache: {root} cannot be written ({error.strerror}); set data.cache to a folder you may write to"
    )
