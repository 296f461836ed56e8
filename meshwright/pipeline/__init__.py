"""Pipeline schedules as data: which rank does what in which order, checked and simulated; imports no torch."""

from meshwright.pipeline.check import require_consistent
from meshwright.pipeline.picture import KIND_NAMES, Frame, draw_axis, draw_ranks, gantt_svg
from meshwright.pipeline.schedules import SCHEDULES, build_table, require_schedule, unchecked_table
from meshwright.pipeline.simulate import Simulation, Span, StageTimes, share_times, simulate
from meshwright.pipeline.table import Action, Kind, Table
from meshwright.pipeline.text import column_time, gantt_lines

__all__ = [
    "KIND_NAMES",
    "SCHEDULES",
    "Action",
    "Frame",
    "Kind",
    "Simulation",
    "Span",
    "StageTimes",
    "Table",
    "build_table",
    "column_time",
    "draw_axis",
    "draw_ranks",
    "gantt_lines",
    "gantt_svg",
    "require_consistent",
    "require_schedule",
    "share_times",
    "simulate",
    "unchecked_table",
]
