"""Measuring: what a job reaches on the hardware at hand, where its time goes, and lists of settings."""

from meshwright.measure.bench import Bench, Spread, bench
from meshwright.measure.sweep import Sweep, settings_of

__all__ = ["Bench", "Spread", "Sweep", "bench", "settings_of"]
