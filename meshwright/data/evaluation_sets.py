"""Evaluation sets: texts a model is judged by, in the tokens it was trained with."""

from pathlib import Path

from pydantic import ValidationError

from meshwright.data.prepare import all_together, prepare
from meshwright.data.prepared import is_prepared, open_prepared
from meshwright.data.prepared.folder import SPLITS, Prepared, ShardedTokens
from meshwright.data.samples import RunningWindows, Windows
from meshwright.data.sequences import windows_of
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data
from meshwright.job.sanitize import without_secrets


def evaluation_windows(
    named: str, source: str, tokenizer: Tokenizer, data: Data, vocab_size: int, sequence_length: int
) -> Windows:
    """All documents of a prepared folder or of a source, as windows of the job's length; errors use its name."""
    windows: Windows
    if data.fields:
        store, windows = _samples(named, source, tokenizer, data, vocab_size, sequence_length)
    else:
        store = _store(named, source, tokenizer, data, vocab_size)
        windows = RunningWindows(store, sequence_length, data.mask_documents)
    if len(windows) == 0:
        raise UserError(
            f"{named} = {source} holds {len(store)} tokens, too few for one sequence of batch.sequence_length = "
            f"{sequence_length}; give more text"
        )
    return windows


def _store(named: str, source: str, tokenizer: Tokenizer, data: Data, vocab_size: int) -> TokenStore:
    if is_prepared(source):
        prepared = _prepared(named, source, tokenizer)
        return ShardedTokens([part for split in SPLITS for part in prepared.store(split).parts])
    try:
        alone = Data(sources=(source,), text_field=data.text_field, validation_fraction=0.0, cache=data.cache)
    except ValidationError as error:
        raise UserError(f"{named} = {without_secrets(source)!r}: {error.errors()[0]['msg']}") from None
    return prepare(alone, vocab_size, tokenizer=tokenizer, field=named).train


def _samples(
    named: str, source: str, tokenizer: Tokenizer, data: Data, vocab_size: int, sequence_length: int
) -> tuple[TokenStore, Windows]:
    """Samples with pictures, film and sound, read and packed as those that the job trains on."""
    others = {"weights": None, "stages": (), "join": None, "validation_fraction": 0.0}
    alone = data.model_copy(update={"sources": (source,), **others})
    if is_prepared(source):
        _prepared(named, source, tokenizer)
        # What was taken from a template is in the folder.
        alone = alone.model_copy(update={"chat_template": None})
        corpus = all_together(prepare(alone, vocab_size, field=named))
    else:
        corpus = prepare(alone, vocab_size, tokenizer=tokenizer, field=named)
    return corpus.train, windows_of(corpus, alone, sequence_length)


def _prepared(named: str, source: str, tokenizer: Tokenizer) -> Prepared:
    prepared = open_prepared(Path(source).expanduser())
    if prepared.manifest.tokenizer_sha256 != tokenizer.fingerprint():
        raise UserError(
            f"{named} = {source} was prepared with another tokenizer than the model was trained with; prepare it "
            "again with the run's tokenizer.json"
        )
    return prepared
