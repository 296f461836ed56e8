"""What a job's data section makes of a corpus: the stream it trains on and the windows it is judged by."""

from pathlib import Path

from meshwright.data.blend import Blend
from meshwright.data.corpus import Corpus
from meshwright.data.made import HELD_OUT_KEY, with_noise
from meshwright.data.media.index import MediaIndex
from meshwright.data.media.items import ItemMaker
from meshwright.data.media.pieces import Limits
from meshwright.data.media.windows import MediaWindows
from meshwright.data.packed import PackedWindows, PackIndex, open_packed
from meshwright.data.pairs import PairWindows
from meshwright.data.samples import RunningWindows, Windows
from meshwright.data.store import TokenStore
from meshwright.data.stream import GROUP, Stream
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.fields import item_plan


def training_stream(corpus: Corpus, data: Data, sequence_length: int, seed: int) -> Stream:
    """The stream of a job; refuses a source that has turns but not one sequence."""
    if corpus.windows is not None:
        return Stream((corpus.windows[0],), seed)
    group = GROUP if data.packing == "none" else 1
    if data.weights is None:
        windows = windows_of(corpus, data, sequence_length)
        if len(windows) == 0:
            raise _too_short("data.sources hold", len(corpus.train), data, sequence_length)
        return Stream((windows,), seed, group=group)
    parts = [windows_of(corpus, data, sequence_length, part) for part in range(len(corpus.bounds) - 1)]
    # A stage begins with the first sample of which no token was counted before.
    stages = [(0, data.weights)] + [(-(-stage.tokens // sequence_length), stage.weights) for stage in data.stages]
    for part, (windows, name) in enumerate(zip(parts, data.sources, strict=True)):
        if len(windows) == 0 and any(weights[part] for _, weights in stages):
            tokens = corpus.bounds[part + 1] - corpus.bounds[part]
            raise _too_short(f"data.sources: {name} holds", tokens, data, sequence_length)
    return Stream(parts, seed, Blend(stages), group)


def validation_windows(corpus: Corpus, data: Data, sequence_length: int) -> Windows:
    """The held-out windows of a job in their own order; refuses held-out text too short for one."""
    if corpus.windows is not None:
        return corpus.windows[1]
    store, windows = corpus.validation, RunningWindows(corpus.validation, sequence_length, data.mask_documents)
    found: Windows = windows
    if data.fields and len(store):
        assert corpus.validation_items is not None
        index = _index(
            store, (0, len(store)), data, sequence_length, corpus.folder, "validation", corpus.validation_items
        )
        found = _with_items(store, index, data, sequence_length, corpus.validation_items)
    elif data.packing != "concatenate" and len(store):
        found = _packed(store, (0, len(store)), data, sequence_length, corpus.folder, "validation")
    if len(found) == 0:
        raise UserError(
            f"data.validation_fraction leaves {len(store)} tokens for validation, too few for one sequence of "
            f"batch.sequence_length = {sequence_length}; raise it or add text"
        )
    return with_noise(found, corpus.noise, HELD_OUT_KEY)


def training_index(corpus: Corpus, data: Data, sequence_length: int) -> PackIndex | None:
    """The packed windows of the training text; None where it runs on."""
    if data.packing == "concatenate":
        return None
    return _index(corpus.train, corpus.bounds, data, sequence_length, corpus.folder, "train", corpus.train_items)


def windows_of(corpus: Corpus, data: Data, sequence_length: int, part: int | None = None) -> Windows:
    """The training windows of one source, or of all, in their own order."""
    index = training_index(corpus, data, sequence_length)
    if index is not None and corpus.train_items is not None:
        return _with_items(corpus.train, index, data, sequence_length, corpus.train_items, part)
    if index is not None:
        kind = PairWindows if data.format == "preferences" else PackedWindows
        return with_noise(
            kind(corpus.train, index, sequence_length, data.mask_documents, part), corpus.noise, part or 0
        )
    start, stop = (0, None) if part is None else corpus.bounds[part : part + 2]
    running = RunningWindows(corpus.train, sequence_length, data.mask_documents, start, stop)
    return with_noise(running, corpus.noise, part or 0)


def _packed(
    store: TokenStore, bounds: tuple[int, ...], data: Data, sequence_length: int, folder: Path | None, split: str
) -> PackedWindows:
    index = _index(store, bounds, data, sequence_length, folder, split)
    kind = PairWindows if data.format == "preferences" else PackedWindows
    return kind(store, index, sequence_length, data.mask_documents)


def _index(
    store: TokenStore,
    bounds: tuple[int, ...],
    data: Data,
    sequence_length: int,
    folder: Path | None,
    split: str,
    items: MediaIndex | None = None,
) -> PackIndex:
    pairs, limits = data.format == "preferences", None
    plan = item_plan(data, sequence_length)
    if plan is not None and items is not None:
        if plan.tokens > sequence_length:
            raise UserError(
                f"data.fields have items of {plan.tokens} tokens, more than batch.sequence_length = {sequence_length}; "
                "choose a longer sequence, or items of fewer tokens"
            )
        limits = Limits(items, plan.slots, plan.tokens, data.oversize)
    return open_packed(store, bounds, data.packing, sequence_length, folder, split, pairs=pairs, limits=limits)


def _with_items(
    store: TokenStore, index: PackIndex, data: Data, sequence_length: int, items: MediaIndex, part: int | None = None
) -> MediaWindows:
    plan = item_plan(data, sequence_length)
    assert plan is not None
    return MediaWindows(store, index, plan, items, ItemMaker(data), sequence_length, part)


def _too_short(subject: str, tokens: int, data: Data, sequence_length: int) -> UserError:
    if data.format == "preferences":
        return UserError(
            f"{subject} {tokens} training tokens and no pair whose two answers fit together into "
            f"batch.sequence_length = {sequence_length}; add pairs or choose a longer sequence"
        )
    return UserError(
        f"{subject} {tokens} training tokens, too few for one sequence of batch.sequence_length = {sequence_length}, "
        f"which takes {sequence_length + 1}; add text or choose a shorter sequence"
    )
