"""From text to batches: prepare tokens once, then read any step of them by its position."""

from meshwright.data.batch import Batch, Step
from meshwright.data.corpus import Corpus
from meshwright.data.evaluation_sets import evaluation_windows
from meshwright.data.lengths import lengths_of
from meshwright.data.loader import Loader, validation_batches, window_batches
from meshwright.data.made import Slots
from meshwright.data.media.gpu import GpuDecoder, gpu_decoder
from meshwright.data.media.shown import NOTHING, Shown, Viewer
from meshwright.data.prepare import prepare, read_anew
from meshwright.data.readers import WorkerDied
from meshwright.data.references import Blank, References
from meshwright.data.samples import IGNORE, RunningWindows
from meshwright.data.sequences import training_index, training_stream, validation_windows
from meshwright.data.shapes import SHAPES, shapes_corpus
from meshwright.data.store import TokenStore
from meshwright.data.stream import Stream
from meshwright.data.streaming import Cursor, MemoryTokens, StreamLoader, open_flow
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tones import TONES, tones_corpus

__all__ = [
    "IGNORE",
    "NOTHING",
    "SHAPES",
    "TONES",
    "Batch",
    "Blank",
    "Corpus",
    "Cursor",
    "GpuDecoder",
    "Loader",
    "MemoryTokens",
    "References",
    "RunningWindows",
    "Shown",
    "Slots",
    "Step",
    "Stream",
    "StreamLoader",
    "TokenStore",
    "Tokenizer",
    "Viewer",
    "WorkerDied",
    "evaluation_windows",
    "gpu_decoder",
    "lengths_of",
    "open_flow",
    "prepare",
    "read_anew",
    "shapes_corpus",
    "tones_corpus",
    "training_index",
    "training_stream",
    "validation_batches",
    "validation_windows",
    "window_batches",
]
