"""The one door for files that others may have written into a run folder: every reader of them goes through here.

Size, depth, numbers and types are bounded before anything is made of them, links and pipes are not read, and a line
that is not fit costs that line alone.
"""

from meshwright.reading.bounded import (
    FILE_BYTES,
    Unfit,
    open_plain,
    parse_json,
    printable,
    read_object,
    read_plain,
    read_text,
)
from meshwright.reading.kinds import ATTEMPTS, EVENTS, MEMORY, METRICS, is_number
from meshwright.reading.rows import Kind, Row, Tally, batches_of, kept_rows, rows_in, stream_rows

__all__ = [
    "ATTEMPTS",
    "EVENTS",
    "FILE_BYTES",
    "MEMORY",
    "METRICS",
    "Kind",
    "Row",
    "Tally",
    "Unfit",
    "batches_of",
    "is_number",
    "kept_rows",
    "open_plain",
    "parse_json",
    "printable",
    "read_object",
    "read_plain",
    "read_text",
    "rows_in",
    "stream_rows",
]
