"""Plans and runs in the browser: reports as files, and a live page."""

from meshwright.studio.drawing import write_plan_svg
from meshwright.studio.plan_report import write_plan_report
from meshwright.studio.report import write_report
from meshwright.studio.server import Studio

__all__ = ["Studio", "write_plan_report", "write_plan_svg", "write_report"]
