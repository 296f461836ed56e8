"""A run on disk: its folder, its records, resuming, and reading it back; needs no torch here."""

from meshwright.runs.folder import RunFolder, state_of
from meshwright.runs.metrics import Metrics

__all__ = ["Metrics", "RunFolder", "state_of"]
