"""Measuring: a job's speed on this hardware, where its time goes, lists of settings, and the hardware itself."""

from meshwright.measure.bench import Bench, Spread, bench
from meshwright.measure.calibrate import measure_profile
from meshwright.measure.identity import profile_name
from meshwright.measure.loading import DataBench, bench_data
from meshwright.measure.sweep import Sweep, settings_of
from meshwright.measure.tune import Tried, Tuned, tune

__all__ = [
    "Bench",
    "DataBench",
    "Spread",
    "Sweep",
    "Tried",
    "Tuned",
    "bench",
    "bench_data",
    "measure_profile",
    "profile_name",
    "settings_of",
    "tune",
]
