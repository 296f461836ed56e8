"""What a job's data section names, as a corpus: prepared folders as they are, files prepared into the cache once."""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from meshwright.data.cache import building, cache_root, sweep
from meshwright.data.chat import chat_template_in, load_chat_template
from meshwright.data.corpus import Corpus
from meshwright.data.media.index import MediaIndex
from meshwright.data.media.take import media_taking
from meshwright.data.own_sources import with_files
from meshwright.data.prepared.fill import Order, Wishes, fill, order_for
from meshwright.data.prepared.folder import (
    PARTIAL,
    Manifest,
    Prepared,
    ShardedTokens,
    is_prepared,
    open_prepared,
)
from meshwright.data.raw import SYNTHETIC, BadDocuments, Taking, list_inputs
from meshwright.data.raw.media import shaping_of
from meshwright.data.store import SyntheticTokens, TokenStore, token_dtype
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, require_trainable
from meshwright.errors import UserError
from meshwright.job.data import Data

FORMAT = 3
"""Of what is kept in the cache; 2 was that of version 0.1."""

Report = Callable[[str, float], None]


def prepare(
    data: Data,
    vocab_size: int,
    report: Report | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "data.sources",
) -> Corpus:
    """The corpus of a job's data section, tokenised now or taken from the cache; report(stage, fraction) follows it.

    A tokenizer that is given stands in the place of the section's own. `field` is what names the sources in errors.
    """
    if SYNTHETIC in data.sources:
        if data.fields:
            raise UserError(f"data.sources = {SYNTHETIC} has no items for data.fields; name samples with some")
        return _synthetic(data, vocab_size)
    data = with_files(data)
    if any(is_prepared(name) for name in data.sources):
        return _prepared(data, vocab_size)
    given = tokenizer or _given_tokenizer(data.tokenizer, vocab_size)
    taking = _taking(data)
    wishes = Wishes(
        data.sources,
        vocab_size=vocab_size,
        text_field=data.text_field,
        content=data.format,
        join=data.join,
        validation_fraction=data.validation_fraction,
        fields=data.fields,
    )
    with _named_as(field):
        order = order_for(wishes, given, taking)
    root = cache_root(data.cache)
    folder = root / f"tokens-{_key(order)}"
    sweep(root)
    if not _is_complete(folder):
        try:
            with building(folder, _is_complete) as draft, _named_as(field):
                fill(draft, order, None, lambda progress: report(progress.stage, progress.share) if report else None)
                shutil.rmtree(draft / PARTIAL)
        except OSError as error:
            raise _unwritable(error, root, order) from error
    return _open(folder, order)


@contextmanager
def _named_as(field: str) -> Iterator[None]:
    """Inside, errors in the input are reported for the field that names it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}: {error}") from error


def _open(folder: Path, order: Order) -> Corpus:
    try:
        prepared = open_prepared(folder)
    except UserError as error:
        raise UserError(
            f"data.cache: {folder} was damaged since it was prepared; start again, and it is rebuilt"
        ) from error
    manifest = prepared.manifest
    bounds = accumulate((train for train, _ in manifest.source_tokens(len(order.wishes.sources))), initial=0)
    return Corpus(
        prepared.tokenizer,
        _plain(prepared.store("train")),
        _plain(prepared.store("validation")),
        folder,
        (0, manifest.tokens["train"]) if manifest.join else tuple(bounds),
        (*_bad(manifest), *prepared.missing(), *order.inputs.notes),
        chat=order.taking.chat,
        train_items=prepared.items("train"),
        validation_items=prepared.items("validation"),
    )


def _plain(store: ShardedTokens) -> TokenStore:
    """A single shard is read without a look for the right one."""
    return store.parts[0] if len(store.parts) == 1 else store


def _bad(manifest: Manifest) -> list[str]:
    """A sentence about documents that cannot be used, if there are any."""
    bad = BadDocuments(dict(manifest.bad))
    if not bad.against_limit:
        return []
    return [f"left out of data.sources, since they cannot be used: {bad.sentence()}"]


def read_anew(data: Data) -> str:
    """Where version 0.1 took other documents from the sources of a job: a remark on that, else nothing."""
    if data.stream or SYNTHETIC in data.sources or any(is_prepared(name) for name in data.sources):
        return ""
    files = list_inputs(data.sources).files
    anew = [file.name for file in files if file.format not in ("text", "jsonl") or file.compression != "none"]
    told = "took CSV files for plain text and passed over compressed files, Parquet, Arrow and tar"
    return f" (version 0.1 {told}, and {anew[0]} is now read by rows or unpacked)" if anew else ""


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
        if folder.manifest.fields != (wanted := {name: shaping_of(own) for name, own in data.fields.items()}):
            raise UserError(
                f"data.fields do not fit {folder.folder}, which was prepared with {folder.manifest.fields or 'none'} "
                f"and not {wanted or 'none'}; correct them or prepare the folder again"
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
    chat = chat_template_in(first.folder, first.tokenizer) if data.format != "text" else None
    place = first.folder if alone else None
    items = [_items(folders, split) for split in ("train", "validation")]
    return Corpus(
        first.tokenizer,
        train,
        validation,
        place,
        () if alone else bounds,
        chat=chat,
        train_items=items[0],
        validation_items=items[1],
    )


def all_together(corpus: Corpus) -> Corpus:
    """A corpus that holds nothing out: samples of validation follow those to train on."""
    train, held_out = corpus.train_items, corpus.validation_items
    if not len(corpus.validation) or train is None or held_out is None:
        return corpus
    store = ShardedTokens([one for one in (corpus.train, corpus.validation) if len(one)])
    items = MediaIndex([*train.shifted(0), *held_out.shifted(len(corpus.train))])
    return replace(corpus, train=store, folder=None, source_bounds=(), train_items=items)


def _items(folders: Sequence[Prepared], split: str) -> MediaIndex | None:
    """Where the pictures, film and sound of all folders are."""
    shards, tokens = [], 0
    for folder in folders:
        own = folder.items(split)
        if own is None:
            return None
        shards += own.shifted(tokens)
        tokens += len(folder.store(split))
    return MediaIndex(shards)


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
        require_trainable(vocab_size)
        return None
    path = Path(name).expanduser()
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer = {path} has {tokenizer.vocab_size} entries but model.vocab_size = {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _taking(data: Data) -> Taking:
    return media_taking(_texts(data), data.fields, data.encoder, data.check, data.sources)


def _texts(data: Data) -> Taking:
    if data.join is not None and len(data.sources) < 2:
        raise UserError(f'data.join = "{data.join}" needs two data.sources or more; name them or leave it out')
    if data.format == "text":
        return Taking(data.text_field, data.join)
    tokenizer = None if data.tokenizer is None else Path(data.tokenizer).expanduser()
    return Taking(chat=load_chat_template(tokenizer, data.chat_template), pairs=data.format == "preferences")


def _key(order: Order) -> str:
    """A name for exactly this preparation: anything that would change the tokens changes it."""
    told = [FORMAT, order.identity, [file.source for file in order.inputs.files]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:20]


def _is_complete(folder: Path) -> bool:
    """Whether the folder is there with every file of the size its manifest states."""
    try:
        open_prepared(folder)
    except UserError:
        return False
    return True


def _unwritable(error: OSError, root: Path, order: Order) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # A token stands for at least a byte of the source.
        needed = order.inputs.size_bytes * token_dtype(order.wishes.vocab_size).itemsize
        return UserError(
            f"data.cache: the disk or quota of {root} is full, and preparing needs up to {needed} bytes there; "
            "free some, or set data.cache to a folder on another disk"
        )
    return UserError(
        f"data.cache: {root} cannot be written ({error.strerror}); set data.cache to a folder you may write to"
    )
