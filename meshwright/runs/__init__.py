"""A run on disk: its folder, its records, resuming, and reading it back; needs no torch here."""

from meshwright.runs.folder import NOTES, RunFolder, state_of
from meshwright.runs.metrics import Metrics

__all__ = ["NOTES", "Metrics", "RunFolder", "state_of"]
