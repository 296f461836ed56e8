"""Durable state of a run."""

from meshwright.checkpoint.beside import whole_folder
from meshwright.checkpoint.hf_files import keep_companions
from meshwright.checkpoint.hf_import import import_weights
from meshwright.checkpoint.hf_read import HfWeights
from meshwright.checkpoint.hf_write import Export, Exported
from meshwright.checkpoint.weights import StoredWeights, load_weights, newest_weights, save_weights, weights_path

__all__ = [
    "Export",
    "Exported",
    "HfWeights",
    "StoredWeights",
    "import_weights",
    "keep_companions",
    "load_weights",
    "newest_weights",
    "save_weights",
    "weights_path",
    "whole_folder",
]
