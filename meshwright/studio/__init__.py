"""Runs as pages for people."""

from meshwright.studio.report import write_report

__all__ = ["write_report"]
