"""Durable state of a run."""

from meshwright.checkpoint.weights import load_weights, newest_weights, save_weights, weights_path

__all__ = ["load_weights", "newest_weights", "save_weights", "weights_path"]
