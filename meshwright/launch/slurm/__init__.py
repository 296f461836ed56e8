"""Runs on a Slurm site: one readable batch script each, status, logs, cancelling; needs no torch."""

from meshwright.launch.slurm.cancel import cancel
from meshwright.launch.slurm.commands import NoAnswer
from meshwright.launch.slurm.logs import end_of, files_log, follow, is_recorded, log_files
from meshwright.launch.slurm.record import FOLDER, REHEARSE, REHEARSED, Submission
from meshwright.launch.slurm.recorded import RecordedLog
from meshwright.launch.slurm.script import Request, Shape, batch_script, request_of
from meshwright.launch.slurm.status import Status, status_of, statuses

__all__ = [
    "FOLDER",
    "REHEARSE",
    "REHEARSED",
    "NoAnswer",
    "RecordedLog",
    "Request",
    "Shape",
    "Status",
    "Submission",
    "batch_script",
    "cancel",
    "end_of",
    "files_log",
    "follow",
    "is_recorded",
    "log_files",
    "request_of",
    "status_of",
    "statuses",
]
