"""Starting runs and keeping what they leave behind; `meshwright.launch.local` trains, this face needs no torch."""

from meshwright.launch.folder import RunFolder, state_of
from meshwright.launch.metrics import Metrics

__all__ = ["Metrics", "RunFolder", "state_of"]
