"""From text to batches: prepare tokens once, then read any step of them by its position."""

from meshwright.data.batch import Batch, Step
from meshwright.data.loader import Loader, validation_batches
from meshwright.data.prepare import Corpus, prepare
from meshwright.data.samples import IGNORE
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import Tokenizer

__all__ = ["IGNORE", "Batch", "Corpus", "Loader", "Step", "TokenStore", "Tokenizer", "prepare", "validation_batches"]
