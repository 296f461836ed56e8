"""Meshwright plans, verifies and runs LLM training."""

from meshwright.version import VERSION as __version__

__all__ = ["__version__"]
