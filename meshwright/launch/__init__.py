"""Starting runs and keeping what they leave behind; `meshwright.launch.local` trains, this face needs no torch."""

from meshwright.launch.folder import RunFolder, rows_of, state_of

__all__ = ["RunFolder", "rows_of", "state_of"]
