"""What a job's data section makes of a corpus: the stream it trains on and the windows it is judged by."""

from pathlib import Path

from meshwright.data.blend import Blend
from meshwright.data.corpus import Corpus
from meshwright.data.packed import PackedWindows, PackIndex, open_packed
from meshwright.data.pairs import PairWindows
from meshwright.data.samples import RunningWindows, Windows
from meshwright.data.store import TokenStore
from meshwright.data.stream import GROUP, Stream
from meshwright.errors import UserError
from meshwright.job.data import Data


def training_stream(corpus: Corpus, data: Data, sequence_length: int, seed: int) -> Stream:
    """The stream of a job; refuses a source that has turns but not one sequence."""
    group = GROUP if data.packing == "none" else 1
    if data.weights is None:
        windows = _windows(corpus, data, sequence_length)
        if len(windows) == 0:
            raise _too_short("data.sources hold", len(corpus.train), data, sequence_length)
        return Stream((windows,), seed, group=group)
    parts = [_windows(corpus, data, sequence_length, part) for part in range(len(corpus.bounds) - 1)]
    # A stage begins with the first sample of which no token was counted before.
    stages = [(0, data.weights)] + [(-(-stage.tokens // sequence_length), stage.weights) for stage in data.stages]
    for part, (windows, name) in enumerate(zip(parts, data.sources, strict=True)):
        if len(windows) == 0 and any(weights[part] for _, weights in stages):
            tokens = corpus.bounds[part + 1] - corpus.bounds[part]
            raise _too_short(f"data.sources: {name} holds", tokens, data, sequence_length)
    return Stream(parts, seed, Blend(stages), group)


def validation_windows(corpus: Corpus, data: Data, sequence_length: int) -> Windows:
    """The held-out windows of a job in their own order; refuses held-out text too short for one."""
    store, windows = corpus.validation, RunningWindows(corpus.validation, sequence_length, data.mask_documents)
    found: Windows = windows
    if data.packing != "concatenate" and len(store):
        found = _packed(store, (0, len(store)), data, sequence_length, corpus.folder, "validation")
    if len(found) == 0:
        raise UserError(
            f"data.validation_fraction leaves {len(store)} tokens for validation, too few for one sequence of "
            f"batch.sequence_length = {sequence_length}; raise it or add text"
        )
    return found


def training_index(corpus: Corpus, data: Data, sequence_length: int) -> PackIndex | None:
    """The packed windows of the training text; None where it runs on."""
    if data.packing == "concatenate":
        return None
    pairs = data.format == "preferences"
    return open_packed(corpus.train, corpus.bounds, data.packing, sequence_length, corpus.folder, "train", pairs=pairs)


def _windows(corpus: Corpus, data: Data, sequence_length: int, part: int | None = None) -> Windows:
    """The training windows of one source, or of all."""
    index = training_index(corpus, data, sequence_length)
    if index is not None:
        kind = PairWindows if data.format == "preferences" else PackedWindows
        return kind(corpus.train, index, sequence_length, data.mask_documents, part)
    start, stop = (0, None) if part is None else corpus.bounds[part : part + 2]
    return RunningWindows(corpus.train, sequence_length, data.mask_documents, start, stop)


def _packed(
    store: TokenStore, bounds: tuple[int, ...], data: Data, sequence_length: int, folder: Path | None, split: str
) -> PackedWindows:
    pairs = data.format == "preferences"
    index = open_packed(store, bounds, data.packing, sequence_length, folder, split, pairs=pairs)
    return (PairWindows if pairs else PackedWindows)(store, index, sequence_length, data.mask_documents)


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
