"""Starting runs and keeping what they leave behind; `meshwright.launch.local` trains, this face needs no torch."""

from meshwright.launch.folder import RunFolder

__all__ = ["RunFolder"]
