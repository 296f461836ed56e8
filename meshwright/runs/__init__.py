"""What a run is on disk: its folder, its records, where it goes on from, and what is read back; needs no torch here."""

from meshwright.runs.folder import RunFolder, state_of
from meshwright.runs.metrics import Metrics

__all__ = ["Metrics", "RunFolder", "state_of"]
